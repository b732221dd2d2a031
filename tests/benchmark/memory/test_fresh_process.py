"""A fresh process: peaks that do not depend on this one, and every way in which a process can end."""

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from stackwise.benchmark.memory import fresh_process
from stackwise.benchmark.memory.fresh_process import FreshProcessError, fresh_peak_memory
from stackwise.benchmark.memory.peak import peak_memory_bytes

MB = 1_000_000
CALLS = str(Path(__file__).with_name("fresh_calls.py"))
pytestmark = pytest.mark.skipif(
    peak_memory_bytes(lambda: None, torch.device("cpu")) is None,
    reason="this kernel does not reset the high-water mark",
)


def here(numel):
    """A factory in a test file, which pytest imports in its own way."""
    return lambda: torch.zeros(numel).add_(1)


def held(bytes_before, bytes_of_call):
    """As `hold` of fresh_calls, in a test file."""
    set_up = torch.ones(bytes_before // 4)
    return lambda: set_up[: bytes_of_call // 4].add(1)


def test_peak_excludes_what_this_process_holds():
    """The baseline is the same process without set-up and call, since builds of PyTorch differ in size."""
    baseline = fresh_peak_memory(held, 0, 0).peak
    mine = torch.ones(50_000_000)
    found = fresh_peak_memory(held, 100 * MB, 40 * MB)
    peak = found.peak
    assert mine.nbytes == 200 * MB
    assert peak.added == pytest.approx(40 * MB, abs=15 * MB)
    assert peak.in_use - baseline.in_use == pytest.approx(140 * MB, abs=30 * MB)
    assert peak.before + peak.added == peak.in_use
    assert found.lifetime >= peak.in_use


@pytest.mark.slow
def test_peak_and_lifetime():
    found = fresh_peak_memory(f"{CALLS}:hold", 25_000_000, 75_000_000)
    assert found.peak.added == pytest.approx(100 * MB, abs=15 * MB)
    assert found.lifetime - found.peak.before == pytest.approx(300 * MB, abs=40 * MB)


@pytest.mark.slow
def test_a_module_by_its_name(monkeypatch):
    monkeypatch.syspath_prepend(Path(CALLS).parent)
    assert fresh_peak_memory("fresh_calls:nothing").peak.added < 20 * MB


@pytest.mark.parametrize("way", ["module", "file", "function"])
def test_how_the_other_process_finds_what_it_calls(monkeypatch, way):
    monkeypatch.syspath_prepend(Path(CALLS).parent)
    wanted = {"module": "fresh_calls:nothing", "file": f"{CALLS}:nothing", "function": here}[way]
    request = fresh_process._Request(*fresh_process._place_of(wanted), (), "cpu", 1)
    found = fresh_process._found(request)
    assert found.__name__ == ("here" if way == "function" else "nothing")
    assert callable(found(1) if way == "function" else found())


def test_a_path_with_a_colon(tmp_path):
    file = tmp_path / "a:x" / "calls_behind_a_colon.py"
    file.parent.mkdir()
    file.write_text("def nothing():\n    return print\n")
    module, place, name = fresh_process._place_of(f"{file}:nothing")
    assert (module, place, name) == ("", str(file), "nothing")
    assert fresh_process._found(fresh_process._Request(module, place, name, (), "cpu", 1))() is print


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (-9, "here: its process was ended by SIGKILL\na last word"),
        (3, "here: its process ended with status 3\na last word"),
        (None, "here: its process did not finish in 7 s\na last word"),
    ],
    ids=["signal", "status", "time"],
)
def test_how_a_process_ended_is_told(monkeypatch, status, text):
    def run(folder, seconds):
        (folder / "log").write_text("first\n" * 9 + "a last word\n")
        return status

    monkeypatch.setattr(fresh_process, "_run", run)
    with pytest.raises(FreshProcessError) as error:
        fresh_peak_memory(here, 1, seconds=7)
    lines = str(error.value).splitlines()
    assert f"{lines[0]}\n{lines[-1]}" == text
    assert len(lines) == 1 + 5


@pytest.mark.slow
def test_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from stackwise.benchmark.memory.fresh_process import fresh_peak_memory\n"
        "def factory(numel):\n"
        "    return lambda: torch.ones(numel)\n"
        "if __name__ == '__main__':\n"
        "    print(fresh_peak_memory(factory, 25_000_000).peak.added)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == pytest.approx(100 * MB, abs=15 * MB)


@pytest.mark.slow
def test_a_script_without_a_guard_starts_one_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, torch\n"
        "with pathlib.Path(__file__).with_name('log').open('a') as log:\n"
        "    log.write(f'{__name__}\\n')\n"
        "from stackwise.benchmark.memory.fresh_process import fresh_peak_memory\n"
        "def factory():\n"
        "    return lambda: torch.ones(9)\n"
        "fresh_peak_memory(factory)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert "fresh_peak_memory: called at the top of the module" in done.stderr
    assert len((tmp_path / "log").read_text().split()) == 2


def test_a_module_that_is_imported_for_it_starts_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(fresh_process, "_is_importing", False)
    script = tmp_path / "calls_at_the_top.py"
    call = (
        "from stackwise.benchmark.memory.fresh_process import fresh_peak_memory\nfresh_peak_memory('a:b')\n"
    )
    script.write_text(call)
    request = fresh_process._Request("", str(script), "factory", (), "cpu", torch.get_num_threads())
    (tmp_path / "request").write_bytes(pickle.dumps(request))
    fresh_process.main(str(tmp_path))
    _, error = pickle.loads((tmp_path / "answer").read_bytes())
    assert "called at the top of the module that its own process imports" in error


@pytest.mark.slow
def test_as_many_threads_and_no_pytest(tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fresh_peak_memory(f"{CALLS}:threads", str(tmp_path / "said"))
    finally:
        torch.set_num_threads(before)
    threads, process, loaded = (tmp_path / "said").read_text().split()
    assert (threads, loaded) == ("2", "False")
    assert int(process) != os.getpid()


SLOW = pytest.mark.slow  # each is a process of its own


@pytest.mark.parametrize(
    "name, arguments, text",
    [
        ("fails", ("calling",), "KeyError: 'no such batch' (fresh_calls.py:"),
        pytest.param("killed", (), "its process was ended by SIGKILL", marks=SLOW),
        pytest.param("fails", ("setting up",), "KeyError: 'no such weights' (fresh_calls.py:", marks=SLOW),
        pytest.param("no_function", (), "TypeError: returned int; wanted what is measured", marks=SLOW),
        pytest.param("a_model", (), "TypeError: returned Linear(), an nn.Module; wanted", marks=SLOW),
        pytest.param("missing", (), "fresh_calls.py has no missing; it defines", marks=SLOW),
        pytest.param("hold", (), "TypeError: hold() missing 1 required positional", marks=SLOW),
        pytest.param("leaves", (3,), "its process ended with status 3\na last word", marks=SLOW),
    ],
    ids=["call", "signal", "set-up", "no function", "model", "missing", "argument", "exit"],
)
def test_what_went_wrong_is_told(name, arguments, text):
    with pytest.raises(FreshProcessError) as error:
        fresh_peak_memory(f"{CALLS}:{name}", *arguments)
    assert str(error.value).startswith(f"{name}: ")
    assert text in str(error.value)


@pytest.mark.slow
def test_process_that_takes_too_long_is_killed_with_its_children(tmp_path, monkeypatch, ends):
    child = tmp_path / "child"

    class Popen(subprocess.Popen):
        """Process whose 30 seconds are over as soon as it has a child."""

        def wait(self, timeout=None):
            while timeout == 30 and not (child.exists() and child.read_text()):
                time.sleep(0.01)
            return super().wait(0.01 if timeout == 30 else timeout)

    monkeypatch.setattr(fresh_process.subprocess, "Popen", Popen)
    with pytest.raises(FreshProcessError, match=r"sleeps: its process did not finish in 30 s"):
        fresh_peak_memory(f"{CALLS}:sleeps", str(child), seconds=30)
    assert ends(int(child.read_text()))


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not this one")


@pytest.mark.parametrize(
    "factory, arguments, text",
    [
        (lambda: None, (), "factory: got <function"),
        (lambda: None, (), "a function at the top of a module, or 'MODULE:FACTORY'"),
        ("models", (), "factory: got 'models'; allowed: a function at the top of a module"),
        ("models:", (), "factory: got 'models:'"),
        (3, (), "factory: got 3"),
        (here, (Unpicklable(),), "allowed: what pickle takes (not this one)"),
    ],
    ids=["lambda", "allowed", "no name", "empty name", "number", "argument"],
)
def test_what_another_process_cannot_have(factory, arguments, text):
    with pytest.raises(ValueError) as error:
        fresh_peak_memory(factory, *arguments)
    assert text in str(error.value)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), "3"])
def test_seconds_out_of_range(seconds):
    with pytest.raises(ValueError, match=r"seconds: got .*; allowed: a finite number > 0"):
        fresh_peak_memory(here, 1, seconds=seconds)

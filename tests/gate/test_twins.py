"""Twins: what they have in common, what each becomes, and that none is left."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stackwise.gate.side import twin as program
from stackwise.gate.side.channel import DESCRIPTOR, ChannelClosedError
from stackwise.gate.twins import Twins, interpreter
from tests.forked import HANG_SECONDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are none")

# In the place of pytest, which is found in the folder.
PYTEST = """
import json, os, sys
told = {
    "argv": sys.argv[1:],
    "path": sys.path[:3],
    "folder": os.getcwd(),
    "session": os.getsid(0) == os.getpid(),
    "name": __name__,
    "module": sys.modules["__main__"].__spec__.name,
    "hash": hash("layout"),
    "place": [id(sys), id(object), id(json.dumps)],
    "who": os.environ["WHO"],
    "customized": os.environ.get("CUSTOMIZED"),
    "path_variable": os.environ["PYTHONPATH"],
}
print(json.dumps(told), flush=True)
os.read(int(os.environ["CHANNEL"]), 1)
if sys.argv[1:] == ["exit"]:
    sys.exit(5)
import time
time.sleep(600)
""".replace("CHANNEL", DESCRIPTOR)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A pair, as its twins, their channels and what reads what each has told."""
    pairs, channels = [], []
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "inherited"))

    def of(seed=0, arguments=("exit", "stay")):
        twins = Twins(seed, tmp_path / "twins.log")
        pairs.append(twins)
        found = []
        for who, argument in zip(("base", "head"), arguments, strict=True):
            folder = tmp_path / who
            (folder / "pytest").mkdir(parents=True, exist_ok=True)
            (folder / "pytest" / "__init__.py").touch()
            (folder / "first").mkdir(exist_ok=True)
            (folder / "first" / "sitecustomize.py").write_text(
                f"import os\nos.environ['CUSTOMIZED'] = {who!r}\n"
            )
            (folder / "pytest" / "__main__.py").write_text(PYTEST)
            found.append(
                twins.become(
                    "pytest",
                    [argument],
                    folder=folder,
                    import_path=[folder / "first"],
                    environment={"WHO": who, "PYTHONPATH": who, "TMPDIR": str(folder)},
                    log=tmp_path / f"{who}.log",
                )
            )
        channels.extend(channel for _, channel in found)
        return twins, found

    yield of
    for twins in pairs:
        twins.end()
    for channel in channels:
        channel.close()


def told(tmp_path, who):
    log = tmp_path / f"{who}.log"
    for _ in range(100 * HANG_SECONDS):
        if log.exists() and log.read_text().endswith("\n"):
            return json.loads(log.read_text())
        time.sleep(0.01)
    raise AssertionError("nothing was told")


def test_they_differ_in_nothing_but_what_they_were_told(made, tmp_path):
    made()
    base, head = (told(tmp_path, who) for who in ("base", "head"))
    assert base["place"] == head["place"] and base["hash"] == head["hash"]
    for who, found in (("base", base), ("head", head)):
        folder = str(tmp_path / who)
        assert found["who"] == found["path_variable"] == found["customized"] == who
        assert found["folder"] == folder
        assert found["path"] == [folder, f"{folder}/first", str(tmp_path / "inherited")]
        assert found["session"] and (found["name"], found["module"]) == ("__main__", "pytest.__main__")
    assert (base["argv"], head["argv"]) == (["exit"], ["stay"])


def test_sitecustomize_of_a_side_replaces_the_installed_one(made, tmp_path, monkeypatch):
    """The installed one runs when the twins' parent starts, as with Debian's Python."""
    installed = tmp_path / "overlay" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "sitecustomize.py").write_text("import os\nos.environ['CUSTOMIZED'] = 'installed'\n")
    monkeypatch.setenv("PYTHONPATH", str(installed))
    made()
    for who in ("base", "head"):
        assert told(tmp_path, who)["customized"] == who


def test_twins_end_if_nobody_holds_their_channels():
    parent, *others = (socket.socketpair() for _ in range(3))
    descriptors = [theirs.fileno() for _, theirs in (parent, *others)]
    process = subprocess.Popen(
        [sys.executable, program.__file__, *map(str, descriptors)],
        pass_fds=descriptors,
        stderr=subprocess.PIPE,
    )
    for own, theirs in (parent, *others):
        theirs.close()
        own.close()
    assert process.communicate(timeout=HANG_SECONDS) == (None, b"") and process.returncode == 0


def test_options_of_the_interpreter_are_handed_on():
    options = ["-OO", "-bb", "-B", "-s", "-Xdev", "-Xutf8=0", "-Xno_debug_ranges", "-Wignore::ImportWarning"]
    look = "import sys; print(sys.flags, sys._xoptions, list(dict.fromkeys(sys.warnoptions)))"
    ask = "from stackwise.gate.twins import interpreter; import json; print(json.dumps(interpreter()))"

    def printed(*command):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    handed_on = json.loads(printed(sys.executable, *options, "-c", ask))
    wanted = printed(sys.executable, *options, "-c", look)
    assert printed(*handed_on, "-c", look) == wanted != printed(sys.executable, "-c", look)
    assert json.loads(printed(sys.executable, "-I", "-c", ask)) == [sys.executable, "-s", "-P"]
    assert interpreter()[0] == sys.executable


def test_each_pair_has_another_layout(made, tmp_path):
    places = set()
    for seed in range(3):
        twins, _ = made(seed)
        places.add((*told(tmp_path, "base")["place"], told(tmp_path, "base")["hash"]))
        twins.end()
        (tmp_path / "base.log").unlink()
    assert len(places) == 3


def test_how_each_has_ended(made, tmp_path, ends):
    twins, [(base, channel), (head, _)] = made()
    assert told(tmp_path, "base") and told(tmp_path, "head")
    assert base.poll() is None and head.poll() is None
    channel.send({})
    assert base.wait(60) == 5 and head.poll() is None
    os.kill(head.pid, signal.SIGSEGV)
    assert head.wait(60) == -signal.SIGSEGV
    pids = base.pid, head.pid
    twins.end()
    assert all(ends(pid) for pid in pids) and twins._process.returncode == 0


def test_both_may_end_at_once(made, tmp_path):
    for _ in range(5):
        twins, [(base, _), (head, _)] = made()
        assert told(tmp_path, "base") and told(tmp_path, "head")
        for pid in (base.pid, head.pid):
            os.kill(pid, signal.SIGSEGV)
        assert (base.wait(60), head.wait(60)) == (-signal.SIGSEGV, -signal.SIGSEGV)
        twins.end()
        assert twins._process.returncode == 0 and twins.log.read_text() == ""
        for who in ("base", "head"):
            (tmp_path / f"{who}.log").unlink()


def test_they_end_together(made, tmp_path, ends):
    _, [(base, _), (head, _)] = made()
    assert told(tmp_path, "base") and told(tmp_path, "head")
    pids = base.pid, head.pid
    base.end()
    assert (base.poll(), head.poll()) == (-signal.SIGKILL, -signal.SIGKILL)
    assert all(ends(pid) for pid in pids)


def test_they_end_where_what_has_forked_them_was_killed(made, tmp_path, ends):
    twins, [(base, _), (head, _)] = made()
    assert told(tmp_path, "base") and told(tmp_path, "head")
    pids = base.pid, head.pid
    twins._process.kill()
    assert base.wait(60) == -signal.SIGKILL
    twins.end()
    assert all(ends(pid) for pid in pids)


def test_one_that_nobody_takes_ends(tmp_path, ends):
    twins = Twins(0, tmp_path / "twins.log")
    pids = twins.pid(0), twins.pid(1)
    twins.end()
    twins.end()
    assert all(ends(pid) for pid in pids)


def test_an_interpreter_that_does_not_start(tmp_path, monkeypatch):
    (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
    Path(tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    twins = Twins(0, tmp_path / "twins.log")
    with pytest.raises(ChannelClosedError):
        twins.pid(0)
    assert twins.code(0) == 3
    twins.end()

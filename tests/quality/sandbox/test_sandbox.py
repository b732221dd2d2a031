"""Code that wants out, and code that does what it should."""

import contextlib
import os
import platform
import re
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stackwise.quality.sandbox import (
    WITHOUT_ISOLATION,
    Sandbox,
    SandboxError,
    SandboxLimits,
    isolation_problem,
    jailed,
    sandbox,
)
from tests.forked import HANG_SECONDS
from tests.quality.sandbox.hostile_programs import HOSTILE
from tests.quality.sandbox.sound_programs import LANGUAGE, SOUND

needs_jail = pytest.mark.skipif(isolation_problem() is not None, reason=str(isolation_problem()))
SHORT = SandboxLimits(seconds=1.5)
# For programs that end by themselves or by their processor time, which takes minutes on a busy machine.
PATIENT = SandboxLimits(seconds=HANG_SECONDS)
# Programs that only the clock on the wall ends. One has to print something before that.
LASTING = dict.fromkeys(("a loop that takes no signal", "reads its channel", "sleeps", "fork bomb"), SHORT)
LASTING["prints without end"] = SandboxLimits(seconds=15.0, cpu_seconds=60.0)
SLOW = ("reads its channel", "sleeps", "prints without end")
# What those that tell of it say, so that silence is no proof.
SAYS = {
    "writes outside": r"WROTE \[\]",
    "traces": r"ATTACHED \[\]",
    "namespaces": r"MADE \[.*\] False",
    "memory that belongs to nobody": r"MADE 0",
    "empty files": r"FILES True",
    "keys of the user": r"KEYS \[\]",
    "sockets of other families": r"OPENED \[\]",
    "connects": r"127.0.0.1 .*\n(.*\n)*.*refused",
    "reads the environment": r"\{'LC_CTYPE'",
    "looks for the nonce": r"\[\]",
    "prints without end": "spam spam",
}
CHECKS = "assert double(2) == 4"


@pytest.fixture
def planted(tmp_path):
    """A secret in a file that anyone may read."""
    path = tmp_path / "secret.txt"
    path.write_text("SECRET-1234")
    path.chmod(0o666)
    return path


@pytest.fixture
def listener():
    """A port, and a name, that somebody listens on; what was heard."""
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
        port = server.getsockname()[1]
        named.bind(f"\0stackwise-test-{port}")
        named.listen()

        def listen(each):
            while True:
                try:
                    each.accept()
                except OSError:
                    return
                heard.append(each)

        threads = [threading.Thread(target=listen, args=(each,), daemon=True) for each in (server, named)]
        for thread in threads:
            thread.start()
        yield port, heard
        server.shutdown(socket.SHUT_RDWR)
        named.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


def comes_true(condition, moments=1200):
    """Wait for it, by moments and not by a clock: a machine that stood still is no failure."""
    for _ in range(moments):
        if condition():
            return
        time.sleep(0.05)
    seen = {}
    for pid in processes():
        for name in ("cmdline", "wchan", "syscall"):
            with contextlib.suppress(OSError):
                seen[pid, name] = Path(f"/proc/{pid}/{name}").read_bytes()
    pytest.fail(f"not so after {moments} moments; what jails do: {seen}")


def processes():
    """Those of jails, but for what other workers of a parallel run have made."""
    lines, parents, jailed = {}, {}, set()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        try:
            status = (folder / "status").read_text()
            lines[pid] = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        parents[pid] = int(re.search(r"^PPid:\s+(\d+)", status, re.MULTILINE)[1])
        user = int(re.search(r"^Uid:\s+(\d+)", status, re.MULTILINE)[1])
        if user >= 2**30 or b"sandbox/jail.py" in lines[pid] or b"/box/" in lines[pid]:
            jailed.add(pid)

    def of_others(pid):
        while pid in parents:
            if pid == os.getpid():
                return False
            if b"pytest" in lines[pid]:
                return True
            pid = parents[pid]
        return False

    return {pid for pid in jailed if not of_others(pid)}


@needs_jail
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in HOSTILE],
)
def test_hostile(name, planted, listener, monkeypatch):
    monkeypatch.setenv("STACKWISE_SECRET", "SECRET-5678")
    port, heard = listener
    program = HOSTILE[name]
    for word, value in {
        "SECRET_PATH": repr(str(planted)),
        "PORT": str(port),
        "PARENT": str(os.getpid()),
    }.items():
        program = program.replace(word, value)
    before = processes()
    limits = LASTING.get(name, replace(PATIENT, cpu_seconds=1.0))
    done = Sandbox(limits).run(program, CHECKS, functions=["double"])
    assert not done.passed
    seen = done.output + done.reason
    assert "SECRET" not in seen
    assert "root:" not in seen
    assert "BECAME" not in seen
    assert len(done.output) <= limits.output_bytes
    assert planted.read_text() == "SECRET-1234"
    assert [path.name for path in planted.parent.iterdir()] == ["secret.txt"]
    assert not Path("/escaped").exists()
    assert heard == []
    # What another worker's test has orphaned is there for a moment.
    comes_true(lambda: processes() <= before)
    assert (done.status == "timed out") == (name in LASTING)
    if name in SAYS:
        assert re.search(SAYS[name], done.output)


@needs_jail
@pytest.mark.parametrize(
    ("program", "checks", "functions"),
    # A third of them in every run.
    [pytest.param(*each, id=str(i), marks=[pytest.mark.slow] * bool(i % 3)) for i, each in enumerate(SOUND)],
)
def test_sound(program, checks, functions):
    done = Sandbox(PATIENT).run(program, checks, functions=functions)
    assert done.passed, done
    assert done.reason == ""


@needs_jail
@pytest.mark.parametrize("name", LANGUAGE)
def test_the_language_is_as_elsewhere(name):
    program, checks = LANGUAGE[name]
    done = Sandbox(PATIENT).run(program, checks, functions=["f"])
    assert done.passed, done


def test_there_are_enough_of_both():
    assert len(HOSTILE) >= 25
    assert len(SOUND) >= 25


@needs_jail
@pytest.mark.parametrize("program, checks, functions", SOUND[:3])
def test_a_sound_program_that_is_asked_for_something_else_fails(program, checks, functions):
    done = Sandbox(PATIENT).run(program, f"{checks}\nassert f is None", functions=functions)
    assert done.status == "failed"
    assert done.reason.startswith("AssertionError")


@needs_jail
def test_what_is_not_plain_is_said():
    assert "a function cannot be handed over" in (
        Sandbox(PATIENT).run("def f(g): return g(1)", "f(lambda x: x)", functions=["f"]).reason
    )
    assert "a object cannot be handed over" in (
        Sandbox(PATIENT).run("def f(): return object()", "f()", functions=["f"]).reason
    )


@needs_jail
def test_setup_is_where_the_checks_are():
    setup = "def helper(x): return x * 10\ndef f(x):\n    '''What is to be written.'''\n"
    assert (
        Sandbox(PATIENT)
        .run("def f(x): return x", "assert helper(f(2)) == 20", functions=["f"], setup=setup)
        .passed
    )


# It expects any error at all.
ANY_ERROR = "try: f(-1)\nexcept Exception: pass\nelse: raise AssertionError"


@needs_jail
@pytest.mark.parametrize(
    ("program", "checks", "reason"),
    [
        ("def f(x: return (((", ANY_ERROR, "cannot be loaded: SyntaxError: "),
        ("def f(x: return (((", "pass", "cannot be loaded: SyntaxError: "),
        ("def f(x): return x\nraise ValueError('here')", ANY_ERROR, "cannot be loaded: ValueError: here"),
        ("import sys\nsys.exit(0)", "pass", "cannot be loaded: SystemExit: 0"),
        ("x = 1", ANY_ERROR, r"defines no function \['f'\]"),
        ("f = 1", ANY_ERROR, r"defines no function \['f'\]"),
    ],
    ids=["syntax", "never called", "raises", "exits", "none", "a number"],
)
def test_a_program_that_cannot_be_loaded_passes_nothing(program, checks, reason):
    done = Sandbox(PATIENT).run(program, checks, functions=["f"])
    assert done.status == "failed"
    assert re.search(f"^CandidateError: the program {reason}", done.reason), done


@needs_jail
def test_a_program_is_loaded_once():
    once = """
import os
print("LOADED", flush=True)
if not os.path.exists("/tmp/once"):
    open("/tmp/once", "w").close()
    raise ValueError("the first time")
def f(x): return x
"""
    done = Sandbox(PATIENT).run(once, "try: f(1)\nexcept ValueError: pass\nassert f(1) == 1", functions=["f"])
    assert (done.status, done.output) == ("failed", "LOADED\n")


@needs_jail
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os\ndef f(x): os._exit(0)", "the process of the candidate ended before it answered"),
        ("def f(x): return object()", "a object cannot be handed over"),
        ("import os\ndef f(x): os.write(3, b'\\0\\0\\0\\4spam')", "no message"),
    ],
    ids=["ends", "returns an object", "nonsense"],
)
def test_what_breaks_the_channel_is_no_expected_error(program, reason):
    done = Sandbox(PATIENT).run(program, ANY_ERROR, functions=["f"])
    assert done.status == "failed"
    assert done.reason.startswith(f"ChannelError: {reason}")
    assert done.reason.endswith("(line 1 of the test)")


@needs_jail
def test_errors_that_the_problem_defines_are_those_of_the_checks():
    setup = """
class Bad(Exception):
    def __init__(self, code):
        self.code = code
        super().__init__(f"code {code}")
class Worse(Bad): pass
"""
    program = """
def f(x):
    if x == 3:
        class Bad(Exception): pass
        raise Bad(3)
    raise Worse(x)
"""
    checks = """
try: f(2)
except Bad as error: assert type(error) is Worse and (error.code, str(error)) == (2, "code 2")
else: raise AssertionError
try: f(3)
except Bad: raise AssertionError("another one")
except Exception as error: assert type(error).__name__ == "Bad"
"""
    done = Sandbox(PATIENT).run(setup + program, checks, functions=["f"], setup=setup)
    assert done.passed, done


@needs_jail
def test_an_error_of_the_problem_whose_arguments_cannot_be_handed_over():
    setup = """
class Bad(Exception):
    def __init__(self, a, b):
        super().__init__(a, b)
"""
    checks = """
try: f()
except Bad as error: assert str(error).startswith("('a', <object object at")
else: raise AssertionError
"""
    program = f"{setup}\ndef f(): raise Bad('a', object())"
    done = Sandbox(PATIENT).run(program, checks, functions=["f"], setup=setup)
    assert done.passed, done


@needs_jail
@pytest.mark.parametrize(
    "setup",
    ["from unittest import *", "import unittest\nclass SkipTest(unittest.SkipTest): pass"],
    ids=["imports it", "defines one"],
)
def test_a_program_skips_no_check_whatever_the_problem_imports(setup):
    program = """
class SkipTest(Exception): pass
def f(): raise SkipTest("none")
"""
    checks = """
import unittest
class Checks(unittest.TestCase):
    def test(self): self.assertEqual(f(), 1)
found = unittest.TestResult()
Checks("test").run(found)
assert not found.skipped and "SkipTest: none" in found.errors[0][1]
"""
    done = Sandbox(PATIENT).run(program, checks, functions=["f"], setup=setup)
    assert done.passed, done


@needs_jail
def test_no_error_imports_a_module_or_skips_a_check():
    program = """
def f(what):
    if what == "skip":
        import unittest
        raise unittest.SkipTest("none")
    raise type("Error", (Exception,), {"__module__": what})("none")
"""
    checks = """
import sys, unittest
before = set(sys.modules)
for module in ("this", "antigravity", "__main__", "plain"):
    try: f(module)
    except Exception as error: assert type(error).__name__ == "Error" and type(error).__base__ is Exception
assert set(sys.modules) == before
class Checks(unittest.TestCase):
    def test(self): self.assertEqual(f("skip"), 1)
found = unittest.TestResult()
Checks("test").run(found)
assert found.errors and not found.skipped
"""
    done = Sandbox(PATIENT).run(program, checks, functions=["f"])
    assert done.passed, done


@needs_jail
def test_what_is_printed_is_kept_up_to_a_limit():
    limits = replace(PATIENT, output_bytes=10)
    done = Sandbox(limits).run("print('0123456789abc', flush=True)\ndef f(): pass", "f()", functions=["f"])
    assert (done.output, done.passed) == ("0123456789", True)


@needs_jail
def test_nothing_is_left_where_files_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert Sandbox(PATIENT).run("def f(): pass", "f()", functions=["f"]).passed
    assert not [*tmp_path.iterdir()]


@needs_jail
def test_a_jail_that_could_not_be_made_is_made_again(monkeypatch):
    held, start, failed = Sandbox(PATIENT), jailed.Jailed.start, []

    def once(self):
        if not failed:
            failed.append(self)
            raise SandboxError("no room")
        start(self)

    monkeypatch.setattr(jailed.Jailed, "start", once)
    assert held.run("def f(): return 1", "assert f() == 1", functions=["f"]).passed
    assert len(failed) == 1


@needs_jail
def test_a_jail_that_is_slow_to_start_is_told_from_one_that_cannot_be_made(monkeypatch):
    held = Sandbox(PATIENT)
    monkeypatch.setattr(jailed, "_UNTIL_MADE", 0.0)
    with pytest.raises(SandboxError, match="a jail was not made within 0 s: the machine is too busy"):
        held.run("def f(): return 1", "assert f() == 1", functions=["f"])


@needs_jail
def test_many_at_once():
    """The limit of processes is of each, and not of all of them."""
    limits = replace(PATIENT, processes=1)
    results = []
    threads = [
        threading.Thread(
            target=lambda: results.append(
                Sandbox(limits).run("def f(): return 1", "assert f() == 1", functions=["f"])
            )
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.status for each in results] == ["passed"] * 6


@needs_jail
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="as root, of whom no limit holds")
def test_root_is_nobody_inside():
    program = "import os\ndef f(): return os.getuid(), os.geteuid(), open('/proc/self/status').read()"
    checks = """
import re
user, effective, status = f()
assert user and effective
for name in ("CapPrm", "CapEff", "CapInh", "CapAmb"):
    assert int(re.search(name + r":\\s+(\\w+)", status)[1], 16) == 0, name
assert "NoNewPrivs:\\t1" in status
"""
    assert Sandbox(PATIENT).run(program, checks, functions=["f"]).passed


@needs_jail
def test_when_its_owner_is_killed_nothing_stays():
    program = "import time\ndef f(): time.sleep(1000)"
    script = f"""
from stackwise.quality.sandbox import Sandbox, SandboxLimits
print("ready", flush=True)
Sandbox(SandboxLimits(seconds=100)).run({program!r}, "f()", functions=["f"])
"""
    before = processes()
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout.readline() == b"ready\n"
            # Two of each: the one outside, the first inside, the program.
            comes_true(lambda: len(processes() - before) >= 6)
        finally:
            owner.kill()
    comes_true(lambda: processes() <= before)


@needs_jail
def test_folders_of_a_killed_run_are_deleted_by_the_next(tmp_path):
    script = """
from stackwise.quality.sandbox import Sandbox, SandboxLimits
sandbox = Sandbox(SandboxLimits(seconds=100))
print("ready", flush=True)
sandbox.run("import time\\ndef f(): time.sleep(1000)", "f()", functions=["f"])
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as killed:
        assert killed.stdout.readline() == b"ready\n"
        comes_true(lambda: len(list(tmp_path.iterdir())) == 1)
        killed.kill()
    [left] = tmp_path.iterdir()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as running:
        assert running.stdout.readline() == b"ready\n"
        comes_true(lambda: len(list(tmp_path.iterdir())) == 1)
        [used] = tmp_path.iterdir()
        subprocess.run(
            [sys.executable, "-c", "from stackwise.quality.sandbox import Sandbox; Sandbox()"],
            env=environment,
            check=True,
        )
        kept = used.exists()
        running.kill()
    assert kept and used != left and not left.exists()


@needs_jail
def test_only_the_interpreter_and_its_library_are_visible():
    program = """
import os
def f():
    found = []
    for folder, folders, names in os.walk("/"):
        folders[:] = [name for name in folders if folder != "/" or name not in ("proc", "dev", "box", "tmp")]
        found += [os.path.join(folder, name) for name in names]
    return found
"""
    library = sysconfig.get_path("stdlib")
    object_or_locale = r"\.so(\.[\d.]+)?$|/gconv/|/locale/|^/etc/ld\.so\.cache$|^/lib\w*$"
    checks = f"""
import os, re
strange = [
    path for path in f()
    if not path.startswith({library + "/"!r}) and path != {os.path.realpath(sys.executable)!r}
    and not re.search({object_or_locale!r}, path)
]
assert strange == [], strange
assert not any("site-packages" in path for path in f())
"""
    limits = SandboxLimits(seconds=30)
    done = Sandbox(limits).run(program, checks, functions=["f"])
    assert done.passed, done


@needs_jail
def test_every_module_of_the_standard_library_can_be_loaded():
    code = """
import glob, importlib, os, sysconfig
def f():
    folder = os.path.join(os.path.dirname(os.__file__), "lib-dynload")
    names = {os.path.basename(path).partition(".")[0] for path in glob.glob(folder + "/*.so")}
    found = []
    for name in sorted(names - {"_tkinter"}):
        try:
            importlib.import_module(name)
            found.append(name)
        except ImportError:
            pass
    return found
"""
    command = [sys.executable, "-I", "-S", "-c", f"{code}\nprint(*f())"]
    outside = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    done = Sandbox().run(code, f"assert f() == {outside}", functions=["f"])
    assert done.passed and outside, done


@needs_jail
@pytest.mark.skipif(platform.machine() != "x86_64", reason="its kernel can call itself another machine")
def test_machine_without_a_filter_is_refused_in_one_line():
    script = """
import ctypes
ctypes.CDLL(None).personality(8)  # PER_LINUX32: uname says i686
from stackwise.quality.sandbox import Sandbox, SandboxError
try:
    Sandbox()
except SandboxError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout.count("\n") == 1
    assert "filter of system calls: got linux on i686; allowed: linux on x86_64 or aarch64" in done.stdout


@needs_jail
def test_interpreter_that_cannot_start_is_reported_in_one_line(monkeypatch):
    held, (_, shown, hidden) = Sandbox(), jailed.interpreter()
    monkeypatch.setattr(jailed, "interpreter", lambda: ("/no/such/python", shown, hidden))
    with pytest.raises(SandboxError, match=r"^no jail can be made here: FileNotFoundError: .*$"):
        held.run("def f(): return 1", "assert f() == 1", functions=["f"])


@pytest.fixture
def no_jail(monkeypatch):
    monkeypatch.setattr(sandbox, "isolation_problem", lambda: "no jail can be made here: OSError: unshare")


def test_without_a_jail_nothing_is_run(no_jail):
    with pytest.raises(SandboxError, match=r"no jail can be made here: OSError: unshare; code that nobody"):
        Sandbox()


def test_without_a_jail_if_told_so_in_so_many_words(no_jail, planted):
    with pytest.raises(
        ValueError, match=r"without_isolation: got 'yes'; allowed: 'run code that nobody has read"
    ):
        Sandbox(without_isolation="yes")
    held = Sandbox(PATIENT, without_isolation=WITHOUT_ISOLATION)
    assert not held.isolated
    for program, checks, functions in SOUND[:20:5]:
        assert held.run(program, checks, functions=functions).passed
    for name in ("os._exit(0)", "equals everything"):
        assert not held.run(HOSTILE[name], CHECKS, functions=["double"]).passed
    endless = Sandbox(SHORT, without_isolation=WITHOUT_ISOLATION)
    assert not endless.run(HOSTILE["a loop that takes no signal"], CHECKS, functions=["double"]).passed
    environment = held.run(
        "import os\ndef f(): return dict(os.environ)", "assert not f().get('PATH')", functions=["f"]
    )
    assert environment.passed


def test_where_jails_can_be_made_they_are():
    if isolation_problem() is None:
        assert Sandbox(without_isolation=WITHOUT_ISOLATION).isolated


@pytest.mark.parametrize("functions", [(), ("a b",), ("",)])
def test_functions_that_are_none(functions, no_jail):
    with pytest.raises(ValueError, match=r"functions: got .*; allowed: one name or more"):
        Sandbox(without_isolation=WITHOUT_ISOLATION).run("", "", functions=functions)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seconds", 0),
        ("cpu_seconds", float("nan")),
        ("memory_bytes", 1000),
        ("processes", 0),
        ("file_bytes", 10),
        ("open_files", 3),
        ("scratch_bytes", 0),
        ("output_bytes", 0),
    ],
)
def test_limits_refused(key, value):
    with pytest.raises(ValueError, match=f"{key}: got"):
        SandboxLimits(**{key: value})


@needs_jail
def test_a_candidate_cannot_end_a_loop_of_the_checks():
    checks = "assert list(map(f, [1, 2, 3])) == [1, 2, 3]\nfor each in map(f, [1]): assert each == 1"
    assert Sandbox(PATIENT).run("def f(x): return x", checks, functions=["f"]).passed
    for program in ("def f(x): raise StopIteration", "def f(x): return next(iter(()))"):
        done = Sandbox(PATIENT).run(program, "for each in map(f, [1]): assert each == 1", functions=["f"])
        assert done.reason.startswith("CandidateError: StopIteration")


@needs_jail
def test_half_a_character():
    assert not Sandbox(PATIENT).run("'\ud800'\ndef f(): return 1", "f()", functions=["f"]).passed
    with pytest.raises(ValueError, match="test: got"):
        Sandbox(PATIENT).run("def f(): pass", "f('\ud800')", functions=["f"])


@needs_jail
def test_whatever_the_mask_of_new_files():
    before = os.umask(0o077)
    try:
        assert Sandbox(PATIENT).run("def f(): return 1", "assert f() == 1", functions=["f"]).passed
    finally:
        os.umask(before)

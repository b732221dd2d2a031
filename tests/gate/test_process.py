"""Real processes of a side: what they answer, and how they end."""

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from stackwise.gate import side
from stackwise.gate.process import SideFailedError, SideProcess, awaited_lock
from stackwise.gate.side.channel import CALLABLE
from stackwise.gate.twins import Twins

TESTS = """
import os, signal, sys, time
import pytest
import work

def test_called_with_arguments(benchmark):
    benchmark.group = "g"
    benchmark.extra_info["x"] = 1
    assert benchmark.stats is None and benchmark.enabled
    assert benchmark(sorted, [3, 1], reverse=True) == [3, 1]

@pytest.mark.parametrize("n", [1])
def test_stats(benchmark, n):
    benchmark(sorted, [3, 1])
    # Of the one turn that is asked for.
    assert benchmark.stats and benchmark.stats["rounds"] == 1
    assert 0 < benchmark.stats["mean"] == benchmark.stats.stats.mean == benchmark.stats.stats.max < 60
    assert benchmark.stats.get("ops") == pytest.approx(1 / benchmark.stats["median"])
    assert benchmark.stats["params"] == {"n": n}
    assert benchmark.stats.as_dict(include_data=True)["stats"]["data"] == [benchmark.stats["mean"]]

def test_pedantic(benchmark):
    log = []
    def setup():
        log.append("setup")
        return ([1, 2],), {"key": abs}
    found = benchmark.pedantic(max, setup=setup, teardown=lambda *a, **k: log.append("teardown"), rounds=3)
    assert found == 2 and log == ["setup", "teardown"] * (len(log) // 2) and len(log) > 2

def test_single(benchmark):
    made = []
    assert benchmark.pedantic(lambda: made.append(1) or len(made)) == 1
    assert benchmark.stats["min"] > 0

def test_twice(benchmark):
    benchmark(int)
    benchmark(int)

def test_woven(benchmark):
    benchmark.weave(int)

@pytest.mark.skip(reason="not today")
def test_skipped(benchmark):
    benchmark(int)

def test_gives_up(benchmark):
    pytest.xfail("not on this machine")

@pytest.mark.xfail(strict=True, reason="known")
def test_expected_to_fail(benchmark):
    raise ValueError("as ever")

def test_never_called(benchmark):
    pass

def test_raises(benchmark):
    benchmark(lambda: 1 / 0)

def test_seed(benchmark):
    benchmark(int)
    assert os.environ["PYTHONHASHSEED"].isdigit() and "STACKWISE_GATE_PADDING" in os.environ

def test_foreign(benchmark):
    sys.path.insert(0, os.environ["ELSEWHERE"])
    import elsewhere
    benchmark(int)

def test_killed(benchmark):
    os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture(params=["twins", "alone"])
def start(request, tmp_path, monkeypatch):
    made, twins = [], request.param == "twins"
    if twins and sys.platform != "linux":
        pytest.skip("there are no twins")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers --strict-config\n")
    (tree / "work.py").write_text("")
    (tree / "test_it.py").write_text(TESTS)
    other = tmp_path / "other"
    other.mkdir()
    (other / "elsewhere.py").write_text("")
    plugin = tmp_path / "plugin"
    shutil.copytree(Path(next(iter(side.__path__))), plugin / "stackwise_side")
    monkeypatch.setenv("ELSEWHERE", str(other))

    def of(tests, text=None, seconds=60.0, arguments=()):
        if text is not None:
            (tree / "test_it.py").write_text(text)
        process = SideProcess(
            "head",
            ["-p", "stackwise_side.plugin", *arguments, "test_it.py"],
            folder=tree,
            import_path=[plugin, tree],
            tree=tree,
            tests=[Path("test_it.py")],
            foreign=[other],
            log=tmp_path / "log",
            seconds=seconds,
            seed=1,
            twins=Twins(1, tmp_path / "twins.log") if twins else None,
        )
        made.append(process)
        process.send(tests=[f"test_it.py::{name}" for name in tests])
        return process

    yield of
    for process in made:
        process.kill()


def gone(process):
    return process._process.poll() is not None


def test_what_a_process_answers(start):
    names = [line.split("(")[0][4:] for line in TESTS.splitlines() if line.startswith("def test_")]
    names[names.index("test_stats")] += "[1]"
    # In another order than theirs; the last two are of consequence for what comes behind them.
    wanted = [*names[:-2][::-1], *names[-2:]]
    process = start([*wanted[:-2], "test_not_there", *wanted[-2:]])
    assert process.receive() == {"collected": [f"test_it.py::{name}" for name in wanted]}
    seen = {}
    for name in wanted[:-1]:
        told = seen.setdefault(name, [])
        while True:
            message = process.receive()
            assert message["test"] == f"test_it.py::{name}"
            if message.get("ready"):
                answer = process.ask(warm_up=0.001)
                if "sample" in answer:
                    assert answer["sample"]["period"] >= answer["sample"]["call"] > 0
                    sample = process.ask(calls=3)["sample"]
                    assert set(sample) == {"time"} and sample["time"] > 0
                    assert process.ask(memory=True)["sample"]["memory"] >= 0
                    process.send(go_on=True)
                    continue
                message = answer
            if "ended" in message:
                told.append((message["ended"], message["detail"]))
            if message.get("over"):
                told.append((message["measured"], message["stray"]))
                assert message["own"]
                break
    assert (
        seen["test_called_with_arguments"]
        == seen["test_pedantic"]
        == seen["test_seed"]
        == seen["test_stats[1]"]
        == seen["test_single"]
        == [(True, "")]
    )
    assert [what for what, _ in seen["test_twice"]] == ["refused", True]
    assert "measures one call" in seen["test_twice"][0][1]
    assert [what for what, _ in seen["test_woven"]] == ["refused", False]
    assert "call benchmark(function)" in seen["test_woven"][0][1]
    assert seen["test_skipped"][0] == ("skipped", "not today")
    assert [what for what, _ in seen["test_gives_up"]] == ["skipped", False]
    assert "not on this machine" in seen["test_gives_up"][0][1]
    assert [what for what, _ in seen["test_expected_to_fail"]] == ["failed", False]
    assert seen["test_never_called"] == [(False, "")]
    assert [what for what, _ in seen["test_raises"]] == ["failed", True]
    assert "ZeroDivisionError" in seen["test_raises"][0][1]
    assert seen["test_foreign"][-1][1].endswith("elsewhere.py")
    with pytest.raises(SideFailedError, match="ended by SIGSEGV") as lost:
        process.receive()
    assert lost.value.how == "crashed"


def test_killed_by_the_system_names_the_shortage_of_memory(start):
    process = start(["test_b"], "import os\n\ndef test_b(benchmark):\n    os.kill(os.getpid(), 9)\n")
    process.receive()
    with pytest.raises(SideFailedError, match=r"SIGKILL.*short of memory") as lost:
        process.receive()
    assert lost.value.how == "killed"


SUBTESTS = """
import unittest
import pytest

def test_skips(benchmark, subtests):
    with subtests.test("gpu"):
        pytest.skip("no gpu")
    benchmark(int)

def test_gives_up(benchmark, subtests):
    with subtests.test("gpu"):
        pytest.xfail("no gpu")
    benchmark(int)

def test_skips_after_the_call(benchmark):
    benchmark(int)
    pytest.skip("no reference result")

class TestCase(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def with_benchmark(self, benchmark):
        self.benchmark = benchmark
    def test_skips(self):
        with self.subTest("gpu"):
            self.skipTest("no gpu")
        self.benchmark(int)

def test_fails(benchmark, subtests):
    with subtests.test("gpu"):
        assert 0, "wrong result"
    benchmark(int)

def test_is_refused(benchmark, subtests):
    with subtests.test("gpu"):
        benchmark.weave(int)
"""


@pytest.mark.skipif(not hasattr(pytest, "Subtests"), reason="pytest has no subtests")
def test_subtest_or_late_skip_does_not_end_a_test(start):
    measured = ["test_skips", "test_gives_up", "test_skips_after_the_call", "TestCase::test_skips"]
    process = start([*measured, "test_fails", "test_is_refused"], SUBTESTS)
    assert len(process.receive()["collected"]) == 6
    for name in measured:
        assert process.receive().get("ready"), name
        process.send(go_on=True)
        message = process.receive()
        assert (message.get("over"), message.get("measured")) == (True, True), message
    message = process.receive()
    assert message["ended"] == "failed"
    assert "wrong result" in message["detail"]
    assert process.receive()["ready"]
    process.send(go_on=True)
    assert process.receive()["ended"] == "failed", "of the test, which has failed subtests"
    assert process.receive()["over"]
    assert process.receive()["ended"] == "refused"


SEEDED = """
import random
import pytest

@pytest.fixture
def seeded(): random.seed(42)

def test_fixture(seeded, benchmark):
    assert random.random() == random.Random(42).random()
    benchmark(int)

class TestSeeded:
    def setup_method(self): random.seed(43)
    def test_method(self, benchmark):
        assert random.random() == random.Random(43).random()
        benchmark(int)
"""


def test_seed_of_a_fixture_is_not_replaced(start):
    process = start(["test_fixture", "TestSeeded::test_method"], SEEDED)
    process.receive()
    for _ in range(2):
        assert process.receive().get("ready")
        process.send(go_on=True)
        assert process.receive()["over"]


UNSTARTED = """
import asyncio
import pytest
from types import SimpleNamespace

async def coroutine(): pass
def generator(): yield
async def stream(): yield
class Later:
    def __await__(self): yield

each = pytest.mark.parametrize("work", [coroutine, generator, stream, Later])

@each
def test_call(benchmark, work): benchmark(work)

@each
def test_arguments(benchmark, work): benchmark(lambda _: work(), 1)

@each
def test_single(benchmark, work): benchmark.pedantic(work)

@each
def test_rounds(benchmark, work): benchmark.pedantic(work, rounds=3)

@each
def test_setup(benchmark, work): benchmark.pedantic(work, setup=lambda: None, rounds=3)

@pytest.fixture(autouse=True)
def workload(request, monkeypatch):
    def workload_of(request, subject, arguments):
        call, each_token = (None, lambda _: subject()) if arguments else (subject, None)
        return SimpleNamespace(call=call, prepare=None, each_token=each_token, tokens=0)
    class Fixtures:
        pass
    made = Fixtures()
    made.workload_of = workload_of
    get = request.config.pluginmanager.get_plugin
    theirs = lambda name: made if name == "stackwise-throughput" else get(name)
    monkeypatch.setattr(request.config.pluginmanager, "get_plugin", theirs)

@each
def test_throughput(throughput, work): throughput(work)

@each
def test_tokens(throughput, work): throughput(work, mode="generate")
"""


def test_a_call_that_has_not_run_is_refused(start):
    forms = [line.split("(")[0][4:] for line in UNSTARTED.splitlines() if line.startswith("def test_")]
    names = [f"{form}[{work}]" for form in forms for work in ("coroutine", "generator", "stream", "Later")]
    process = start(names, UNSTARTED)
    assert len(process.receive()["collected"]) == len(names) == 28
    for name in names:
        assert process.receive()["ready"], name
        answer = process.ask(**({"calls": 1} if "single" in name else {"warm_up": 0.001}))
        assert answer.get("ended") == "refused", (name, answer)
        assert "call: got a function that returns a " in answer["detail"]
        assert ", which has not run; wanted one that " in answer["detail"]
        assert process.receive()["over"]


def test_benchmark_is_refused_where_two_callables_are_compared(start, monkeypatch):
    monkeypatch.setenv(CALLABLE, "1")
    calls = {
        "test_call": "benchmark(int)",
        "test_single": "benchmark.pedantic(int)",
        "test_rounds": "benchmark.pedantic(int, rounds=3)",
        "test_setup": "benchmark.pedantic(int, setup=lambda: None, rounds=3)",
    }
    process = start([*calls], "".join(f"def {name}(benchmark): {call}\n" for name, call in calls.items()))
    assert len(process.receive()["collected"]) == len(calls)
    for name in calls:
        answer = process.receive()
        assert answer.get("ended") == "refused", (name, answer)
        assert "benchmark has no `against`: use throughput(new, against=old)" in answer["detail"]
        assert process.receive()["over"]


TRACED = """
import sys, threading, tracemalloc
import pytest

def tracer(*_): return None

@pytest.fixture(params=["nothing", "trace", "profile", "threads", "memory"], autouse=True)
def traced(request):
    match request.param:
        case "trace": sys.settrace(tracer)
        case "profile": sys.setprofile(tracer)
        case "threads": threading.setprofile(tracer)
        case "memory": tracemalloc.start()
    yield
    sys.settrace(None)
    sys.setprofile(None)
    threading.setprofile(None)
    tracemalloc.stop()

def test_it(benchmark): benchmark(int)
"""


def test_a_call_under_a_tracer_is_refused(start):
    named = {
        "trace": "test_it.tracer (sys.settrace)",
        "profile": "test_it.tracer (sys.setprofile)",
        "threads": "test_it.tracer (threading.setprofile)",
        "memory": "tracemalloc",
    }
    process = start([f"test_it[{kind}]" for kind in ("nothing", *named)], TRACED)
    assert len(process.receive()["collected"]) == 5
    assert process.receive()["ready"]
    process.send(go_on=True)
    assert process.receive()["over"]
    for name in named.values():
        answer = process.receive()
        assert answer.get("ended") == "refused", answer
        assert f"{name} is active when the measured call begins" in answer["detail"]
        assert process.receive()["over"]


def test_what_instruments_the_run_of_the_user_does_not_reach_a_side(start, tmp_path, monkeypatch):
    """As coverage's `patch = ["subprocess"]` does: a file of site-packages starts it if a variable is set."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if os.getenv('COVERAGE_PROCESS_START') or os.getenv('COVERAGE_PROCESS_CONFIG'):\n"
        "    sys.settrace(lambda *_: None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    for name in ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "COV_CORE_SOURCE", "LINE_PROFILE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONTRACEMALLOC", "5")
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    monkeypatch.setitem(sys._xoptions, "tracemalloc", True)
    monkeypatch.setitem(sys._xoptions, "importtime", True)
    text = """
import os, sys
def test_it(benchmark):
    instruments = ("COV", "LINE_PROFILE", "PYTHONTRACEMALLOC", "PYTHONPROFILEIMPORTTIME")
    assert not [name for name in os.environ if name.startswith(instruments)]
    assert not {"tracemalloc", "importtime"} & set(sys._xoptions)
    assert "sitecustomize" in sys.modules
    benchmark(int)
"""
    process = start(["test_it"], text)
    assert process.receive()["collected"]
    answer = process.receive()
    assert answer.get("ready"), answer


SERVERS = """
import socket, sys
import pytest

def bind(port):
    server = socket.socket()
    server.bind(("127.0.0.1", port))
    return server

@pytest.fixture
def taken():
    with bind(0) as server:
        yield server.getsockname()[1]

@pytest.fixture
def server(taken):
    with bind(taken):
        yield

def test_call(taken): bind(taken)
def test_fixture(server): pass
def test_cause(taken):
    try:
        bind(taken)
    except OSError as error:
        raise RuntimeError("no server") from error
def test_printed():
    print("[Errno 98] error while attempting to bind: address already in use", file=sys.stderr)
    raise TimeoutError("the server does not answer")
def test_other(): raise RuntimeError("something else")
"""


def test_cause_is_named_where_both_sides_take_one_port(start):
    names = ["test_call", "test_fixture", "test_cause", "test_printed", "test_other"]
    process = start(names, SERVERS)
    assert process.receive()["collected"]
    for name in names:
        answer = process.receive()
        assert answer.get("ended") == ("failed" if name == "test_other" else "refused"), answer
        advice = "both sides run at the same time: take a free port, or derive it from STACKWISE_SIDE"
        assert (advice in answer["detail"]) == (name != "test_other"), answer
        assert process.receive()["over"]


def test_cause_is_named_where_a_file_takes_the_port_of_the_other_side(start):
    process = start(["test_it"], "raise OSError(98, 'Address already in use')\n")
    assert process.receive()["detail"].endswith("or derive it from STACKWISE_SIDE")


LOCKS = """
import fcntl, sqlite3
import pytest

def database(tmp_path):
    connection = sqlite3.connect(tmp_path / "db", timeout=0.0)
    connection.execute("BEGIN EXCLUSIVE")
    return connection

def lock(tmp_path):
    file = open(tmp_path / "lock", "w")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file

def library(tmp_path):
    from filelock import FileLock
    return FileLock(tmp_path / "lock", timeout=0.0, thread_local=False).acquire()

@pytest.mark.parametrize("take", [database, lock, library])
def test_taken(take, tmp_path):
    first = take(tmp_path)
    take(tmp_path)
"""


def test_cause_is_named_where_both_sides_take_one_lock(start):
    names = [f"test_taken[{take}]" for take in ("database", "lock", "library")]
    process = start(names, LOCKS)
    assert process.receive()["collected"]
    for _ in names:
        answer = process.receive()
        assert answer.get("ended") == "refused", answer
        assert answer["detail"].endswith("use tmp_path, or derive the name of the file from STACKWISE_SIDE")
        assert process.receive()["over"]


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell who waits for a lock")
def test_cause_is_named_where_a_process_waits_for_a_lock(start, tmp_path):
    import fcntl

    text = f"""
import fcntl
def test_waits():
    with open({str(tmp_path / "lock")!r}, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
"""
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = start(["test_waits"], text)
        assert process.receive()["collected"]
        while not awaited_lock(process._process.pid):
            time.sleep(0.01)
        process._seconds = 0.05
        with pytest.raises(SideFailedError, match=r"it waits for the lock of .*/lock, which the other side"):
            process.receive()


def test_it_has_the_options_of_this_interpreter(start, monkeypatch):
    monkeypatch.setitem(sys._xoptions, "of_the_user", "7")
    text = """
import sys
def test_it(benchmark):
    assert sys._xoptions["of_the_user"] == "7"
"""
    process = start(["test_it"], text)
    assert process.receive()["collected"]
    assert process.receive().get("over")


def test_a_process_that_says_nothing_hangs_and_leaves_no_child(start, tmp_path, ends):
    text = """
import subprocess, sys, time
def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open("child", "w").write(str(child.pid))
    print("so far so good", flush=True)
    time.sleep(600)
"""
    process = start(["test_hangs"], text, seconds=60.0, arguments=["-s"])
    assert process.receive() == {"collected": ["test_it.py::test_hangs"]}
    while not (tmp_path / "tree" / "child").exists():
        time.sleep(0.01)
    process._seconds = 0.05
    with pytest.raises(
        SideFailedError, match=r"(?s)nothing was heard of it for 0.05 s; .*so far so good"
    ) as lost:
        process.receive()
    assert lost.value.how == "hung"
    child = int((tmp_path / "tree" / "child").read_text() or 0)
    process.kill()
    assert gone(process)
    assert not child or ends(child)


def test_a_process_whose_gate_is_gone_ends(start):
    process = start(["test_seed"])
    process.receive()
    assert process.receive()["ready"]
    process._channel.close()
    assert process._process.wait(60) == 3


def test_a_file_that_cannot_be_collected(start):
    process = start(["test_seed"], "import nothing_of_this_name\n")
    message = process.receive()
    assert message["not_collected"] == "test_it.py"
    assert message["detail"] == "ModuleNotFoundError: No module named 'nothing_of_this_name'"


def test_why_files_cannot_be_collected(start, tmp_path):
    files = {
        "test_attribute.py": "import work\nwork.new\n",
        "test_raises.py": "raise RuntimeError('no answer')\n",
        "test_syntax.py": "def (\n",
        "test_class.py": "import pytest\nclass TestIt:\n    @pytest.mark.parametrize('n', 1)\n"
        "    def test_it(self, n): pass\n",
    }
    for name, text in files.items():
        (tmp_path / "tree" / name).write_text(text)
    process = start(
        ["test_it"], "def test_it(new): pass\n", arguments=["--continue-on-collection-errors", *files]
    )
    told = {}
    while "not_collected" in (message := process.receive()):
        told[message["not_collected"]] = message["detail"]
    assert told == {
        "test_attribute.py": "AttributeError: module 'work' has no attribute 'new' (test_attribute.py:2)",
        "test_raises.py": "RuntimeError: no answer (test_raises.py:1)",
        "test_syntax.py": told["test_syntax.py"],
        "test_class.py::TestIt": told["test_class.py::TestIt"],
    }
    assert told["test_syntax.py"].startswith("SyntaxError: invalid syntax (test_syntax.py, line 1)")
    assert told["test_class.py::TestIt"].startswith("TypeError: ")
    assert message == {"collected": ["test_it.py::test_it"]}
    ended = process.receive()
    assert (ended["ended"], ended["when"]) == ("failed", "setup")
    assert ended["detail"] == "fixture 'new' not found"


def test_an_unknown_option(start):
    process = start(["test_seed"], arguments=["--no-such-option"])
    with pytest.raises(SideFailedError, match=r"(?s)it ended with code 4; .*--no-such-option"):
        process.receive()


def test_fixtures_are_torn_down_before_the_last_test_is_over(start, tmp_path):
    text = """
import pathlib, pytest
@pytest.fixture(scope="session", autouse=True)
def made():
    yield
    pathlib.Path("torn_down").touch()
def test_it(benchmark): pass
"""
    process = start(["test_it"], text)
    process.receive()
    assert process.receive()["over"]
    assert (tmp_path / "tree" / "torn_down").exists()


def test_what_an_interpreter_prints_that_cannot_start(start, tmp_path, monkeypatch):
    (tmp_path / "python").write_text("#!/bin/sh\necho Fatal Python error: no codec\nexit 3\n")
    Path(tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SideFailedError, match="Fatal Python error: no codec") as lost:
        start(["test_it"], "").receive()
    assert lost.value.how == "crashed"


def test_a_process_that_does_not_listen_hangs(start, tmp_path):
    (tmp_path / "tree" / "pytest.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(SideFailedError, match=r"it did not listen for 0\.5 s") as lost:
        start([f"test_{number}_{'x' * 100}" for number in range(10_000)], "", seconds=0.5)
    assert lost.value.how == "hung"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system keeps no thread where it is")
def test_a_system_that_keeps_nobody_on_a_processor(start, monkeypatch):
    process = start(["test_it"], "def test_it(benchmark):\n    benchmark(int)\n")
    assert process.receive()["collected"] and process.receive()["ready"]

    def denied(*_):
        raise PermissionError("not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", denied)
    process.keep_on(0)
    assert "sample" in process.ask(calls=1)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system keeps no thread where it is")
def test_its_main_thread_stays_on_a_processor(start):
    text = """
import os
def test_it(benchmark):
    benchmark(lambda: 1 / (len(os.sched_getaffinity(0)) == 1))
"""
    process = start(["test_it"], text)
    assert process.receive()["collected"] and process.receive()["ready"]
    process.keep_on(max(os.sched_getaffinity(0)))
    assert "sample" in process.ask(calls=1)
    process.keep_on(None)
    assert os.sched_getaffinity(process._process.pid) == os.sched_getaffinity(0)

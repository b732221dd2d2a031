"""The gate: `--stackwise-against`, the marker `gate`, and what a run says of a change."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import stackwise.gate.report
import stackwise.gate.session  # before a nested run: NumPy cannot be loaded twice
from pytest_stackwise import options
from pytest_stackwise.gate import (
    Gate,
    GateWarning,
    RegressionError,
    _own_arguments,
    _terminable,
    _Verdict,
    create,
)
from stackwise.gate.limit import Limits
from stackwise.gate.result import GateResult, TestResult, TrialResult
from stackwise.gate.tree import NOTHING_DIFFERS
from stackwise.gate.verdict import Decision, Verdict
from tests.forked import HANG_SECONDS

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

WORK = """
def busy(n):
    total = 0
    for i in range(n):
        total += i * i
    return total

def one():
    return busy({one})

def other():
    return busy({other})
"""
ONE_ROUND = "--stackwise-gate-seconds=0.001"


def git(folder, *arguments):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-C", str(folder), *arguments]
    subprocess.run(command, check=True, capture_output=True, env=environment)


@pytest.fixture
def project(pytester, monkeypatch, tmp_path_factory):
    """A repository with a base and changes since; gives (tests, base, head) -> run(*options)."""
    scratch = tmp_path_factory.mktemp("scratch")
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)

    def of(tests, base, head, ini=""):
        git(pytester.path, "init", "-q")
        pytester.makefile(".ini", pytest=f"[pytest]\npythonpath = .\ntestpaths = bench\n{ini}")
        (pytester.path / "bench").mkdir()
        test_file = pytester.path / "bench" / "test_work.py"
        test_file.write_text(tests)
        for number, text in enumerate((base, head)):
            (pytester.path / "work.py").write_text(text)
            git(pytester.path, "add", "-A")
            git(pytester.path, "commit", "-qm", f"{number}", "--allow-empty")
        git(pytester.path, "tag", "base", "HEAD~1")

    yield of
    assert not [*scratch.glob("stackwise-gate-*")], "a tree was left behind"


def test_what_cannot_be_measured_is_said(project, pytester, monkeypatch):
    summary = pytester.path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    project(
        """
import os, pytest, work
def test_new(benchmark): benchmark(work.new)
@pytest.mark.skip(reason="not today")
def test_skipped(benchmark): benchmark(work.one)
def test_skips_itself(benchmark): pytest.skip("nor today")
@pytest.mark.xfail(strict=True, reason="known")
def test_known(benchmark): benchmark(lambda: 1 / 0)
def test_fails(benchmark): benchmark(lambda: 1 / 0)
def test_ordinary(): assert True
def test_killed(benchmark): benchmark(lambda: work.new and os._exit(9))
def test_short_of_time(benchmark): benchmark(work.one)
def test_too_late(benchmark): benchmark(work.one)
""",
        WORK.format(one=100, other=100),
        WORK.format(one=100, other=100) + "new = one\n",
    )
    result = pytester.runpytest_inprocess(
        "--stackwise-against=base",
        ONE_ROUND,
        "--stackwise-missing=create",
        "--stackwise-gate-report=out",
        "--junitxml=junit.xml",
    )
    result.assert_outcomes(passed=2, skipped=4, xfailed=1, failed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "gate: round 1: 1 of 8 tests undecided, 1 not begun*",
            "set-up error: ZeroDivisionError: division by zero (test_work.py:9); it fails on both sides*",
            "crashed on head: it ended with code 9; *",
            "*= stackwise gate =*",
            "missing on base * failed: AttributeError: module 'work' has no attribute 'new'*",
            "FAILED: working tree at * against base (*): *",
            "gate: wrote *out.md",
            "gate: wrote *out.json",
            "::error *test_fails*",
        ],
        consecutive=False,
    )
    found = json.loads((pytester.path / "out.json").read_text())
    status = {test["nodeid"].split("::")[1]: test["status"] for test in found["tests"]}
    assert status == {
        "test_new": "missing on base",
        "test_skipped": "skipped",
        "test_skips_itself": "skipped",
        "test_known": "set-up error",
        "test_fails": "set-up error",
        "test_killed": "crashed on head",
        "test_short_of_time": "measured",
        "test_too_late": "not begun",
    }
    assert found["environment"]["python"]
    assert found["tests"][4]["file"] == "bench/test_work.py"
    assert found["tests"][4]["line"] == 9
    assert "FAILED" in summary.read_text()
    cases = {case.get("name"): case for case in ET.parse("junit.xml").iter("testcase")}
    assert cases["test_fails"].find("failure") is not None
    properties = {p.get("name"): p.get("value") for p in cases["test_short_of_time"].iter("property")}
    assert properties["gate_time_verdict"] == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("fail", pytest.raises(RegressionError, match="missing on base: why")),
        ("warn", pytest.warns(GateWarning, match="missing on base: why")),
        ("create", contextlib.nullcontext()),
    ],
    ids=["fail", "warn", "create"],
)
def test_what_is_new(missing, expected, request):
    gate = SimpleNamespace(asked=SimpleNamespace(missing=missing))
    with expected:
        _Verdict(request.node, TestResult("bench/test_it.py::test_new", "missing on base", {}, "why"), gate)()


def test_inconclusive_has_an_exit_code_of_its_own(project, pytester):
    work = WORK.format(one=100, other=100)
    project("import work\ndef test_it(benchmark): benchmark(work.one)\n", work, work)
    result = pytester.runpytest_inprocess("--stackwise-against", "HEAD~1", ONE_ROUND, "-rs")
    result.assert_outcomes(skipped=1)
    assert result.ret == 7
    result.stdout.fnmatch_lines(
        [
            NOTHING_DIFFERS,
            "SKIPPED * time INCONCLUSIVE: *",
        ]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stackwise-against=nowhere"], "*got 'nowhere'; allowed: a revision of *"),
        (
            ["--stackwise-against=base", "--stackwise-missing=no"],
            "*missing: got 'no'; allowed: fail, warn*",
        ),
        (["--stackwise-against=base", "--stackwise-gate=time=2"], "*gate: time: got '2'; allowed: *'2%'*"),
        (["--stackwise-against=base", "--stackwise-gate=pace=2%"], "*gate: *'pace'*"),
        (["--stackwise-against=base", "--stackwise-gate-seconds=0"], "*gate-seconds: got '0'; allowed: *"),
        (["--stackwise-against=base", "--stackwise-gate-report=x.txt"], "*gate-report: got x.txt*"),
        (["--stackwise-against=base", "--benchmark-skip"], "*got --benchmark-skip too; allowed: one of them"),
        (["--stackwise-against=base", "-n2"], "*needs the machine to itself; run it with -n 0*"),
        (["--stackwise-against=base", "-k", "ordinary"], "*no test uses benchmark or throughput*"),
        (["--stackwise-head=base"], "*--stackwise-head: allowed with --stackwise-against"),
        (["--stackwise-against="], "*against: got ''; allowed: a revision, *"),
        (
            ["--stackwise-against=callable", "--stackwise-head=base"],
            "*head: not allowed with --stackwise-against=callable*",
        ),
        (["--stackwise-against=base", "--stackwise-build=false"], "*build: 'false' ended with 1 *"),
    ],
)
def test_refused(project, pytester, options, message):
    work = WORK.format(one=100, other=100)
    project(
        "import work\ndef test_it(benchmark): benchmark(work.one)\ndef test_ordinary(): pass\n", work, work
    )
    result = pytester.runpytest_inprocess(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])


def test_sides_inherit_options_except_those_of_the_run_itself(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_ADDOPTS")
    pytester.makeconftest(
        """
def pytest_addoption(parser):
    parser.addoption("--distributed", action="store_true")
    parser.addoption("--verbose-log")
    parser.addoption("--size", nargs=1)
    parser.addoption("--memray", action="store_true")  # as pytest-memray has it
"""
    )
    own = [
        "--stackwise-against=base",
        "--stackwise-gate-seconds",
        "3",
        "--stackwise-gate=time=3%",
        "-x",
        "-vv",
    ]
    own += [
        "--benchmark-only",
        "--junitxml=x.xml",
        "--tb",
        "no",
        "-rs",
        "--lf",
        "--sw",
        "--pdb",
        "--trace",
        "--memray",
    ]
    handed = ["--distributed", "--verbose-log=a.log", "--size=3", "-k", "a or b", "-m", "slow", "-W", "error"]
    config = pytester.parseconfig(*own, *handed, "test_it.py")
    assert _own_arguments(config) == handed


@pytest.mark.parametrize(
    ("given", "handed"),
    [
        (["--sizes", "3", "4", "--color=no"], ["--sizes", "3", "4", "--color=no"]),
        (["--sizes", "-3", "-4"], ["--sizes", "-3", "-4"]),
        (["--sizes=3"], ["--sizes=3"]),
        (["test_it.py", "--mode"], ["--mode"]),
        (["--mode", "fast", "test_it.py"], ["--mode=fast"]),
        (["--mode=-x"], ["--mode=-x"]),
        (["--no-cache-data"], ["--no-cache-data"]),
        (["@arguments.txt"], ["--sizes", "5", "6"]),
        (["-xvsk", "a or b"], ["-s", "-k", "a or b"]),
        (["-k-"], ["-k-"]),
        (["-k", ""], ["-k", ""]),
        (["--benchmark-data=x", "--benchmark-min-rounds=3"], ["--benchmark-data=x"]),
    ],
)
def test_values_stay_with_their_option(pytester, monkeypatch, given, handed):
    monkeypatch.delenv("PYTEST_ADDOPTS")
    pytester.makeconftest(
        """
import argparse
def pytest_addoption(parser):
    parser.addoption("--sizes", nargs="+", type=int)
    parser.addoption("--mode", nargs="?", const="slow")
    parser.addoption("--cache-data", action=argparse.BooleanOptionalAction)
    parser.addoption("--benchmark-data")
"""
    )
    (pytester.path / "arguments.txt").write_text("--sizes\n5\n6\n-x\n")
    assert _own_arguments(pytester.parseconfig(*given)) == handed


def test_options_of_configuration_and_environment_are_handed_over_too(pytester, monkeypatch):
    pytester.makeini("[pytest]\naddopts = bench --maxfail=2 --junitxml=x.xml -k 'a or b'\n")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-x '-W error'")
    assert _own_arguments(pytester.parseconfig("-s", "test_it.py")) == ["-k", "a or b", "-W", " error", "-s"]


def test_each_side_has_temporary_files_of_its_own(project, pytester, monkeypatch):
    """A file at a fixed name, which the first side would make for both."""
    monkeypatch.setenv("TOLD", str(pytester.path / "told"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    tests = """
import os, pathlib, tempfile, work
def test_it(benchmark):
    made = pathlib.Path(tempfile.gettempdir(), "data")
    with made.open("x"): pass
    names = ["TMPDIR", "TEMP", "TMP", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR"]
    places = [os.environ[name] for name in names]
    with open(os.environ["TOLD"], "a") as file:
        print(os.environ["STACKWISE_SIDE"], made.parent, *places, file=file)
    benchmark(work.one)
"""
    project(tests, WORK.format(one=100, other=1), WORK.format(one=100, other=2))
    pytester.runpytest_inprocess("--stackwise-against=base", ONE_ROUND).assert_outcomes(skipped=1)
    told = {
        side: places for side, *places in map(str.split, (pytester.path / "told").read_text().splitlines())
    }
    assert set(told) == {"base", "head"}
    for temporary, *variables in told.values():
        *variables, compiled, extensions, triton = variables
        assert set(variables) == {temporary}
        assert len({compiled, extensions, triton}) == 3
        assert len(temporary) < 70, "sockets lie in it, whose paths have 104 characters at most"
        assert not Path(temporary).exists(), "it is removed"
        assert not Path(compiled).exists()
    assert not set(told["base"]) & set(told["head"])


def test_run_without_any_comparison_does_not_pass(project, pytester):
    work = WORK.format(one=100, other=100)
    project(
        """
import pytest, work
def test_skips_itself(benchmark): pytest.skip("no GPU")
def test_gives_up(benchmark): pytest.xfail("not on this machine")
""",
        work,
        work + "new = one\n",
    )
    # Trees below the project, and no cache: neither is anything to a side.
    (pytester.path / "tmp").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(pytester.path / "tmp"))
        patch.setattr("tempfile.tempdir", None)
        options = ("-p", "no:cacheprovider", "--strict-config", "-rs")
        result = pytester.runpytest_inprocess("--stackwise-against=base", *options)
    result.assert_outcomes(skipped=2)
    assert result.ret == 5
    result.stdout.fnmatch_lines(
        [
            "skipped * bench/test_work.py::test_skips_itself * no GPU",
            "skipped * bench/test_work.py::test_gives_up * not on this machine",
            "INCONCLUSIVE: *: nothing was compared: 2 skipped*",
        ]
    )
    assert not list((pytester.path / "tmp").iterdir())


def test_import_error_does_not_affect_other_files_if_collection_continues(project, pytester):
    work = WORK.format(one=100, other=100)
    project("import work\ndef test_it(benchmark): benchmark(work.one)\n", work, work + "new = one\n")
    (pytester.path / "bench" / "test_broken.py").write_text("import nothing_of_this_name\n")
    result = pytester.runpytest_inprocess("--stackwise-against=base", ONE_ROUND)
    result.assert_outcomes(errors=1)
    result = pytester.runpytest_inprocess(
        "--stackwise-against=base", ONE_ROUND, "--continue-on-collection-errors"
    )
    result.assert_outcomes(errors=1, skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["INCONCLUSIVE * bench/test_work.py::test_it *"])


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("gate(time='2')", "*test_it: marker gate: time: got '2'; allowed: *'2%'*"),
        ("gate(pace='2%')", "*test_it: marker gate: *'pace'*"),
        ("gate('2%')", "*test_it: marker gate takes keyword arguments only"),
        ("gate(memory_floor='lots')", "*test_it: marker gate: memory_floor: got 'lots'*"),
    ],
)
def test_markers_refused(pytester, marker, message):
    pytester.makepyfile(f"import pytest\n@pytest.mark.{marker}\ndef test_it(benchmark): benchmark(int)\n")
    result = pytester.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines([message])


def test_a_marker_without_a_benchmark(pytester):
    pytester.makepyfile("import pytest\n@pytest.mark.gate(time='2%')\ndef test_it(): pass\n")
    result = pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(["*marker gate does nothing here: *benchmark or throughput*"])


def test_without_a_base_a_gated_test_is_a_benchmark(pytester):
    pytester.makepyfile(
        "import pytest\n@pytest.mark.gate(time='2%', floor='50us')\ndef test_it(benchmark): benchmark(int)\n"
    )
    pytester.runpytest_inprocess("--benchmark-disable").assert_outcomes(passed=1)


@pytest.mark.slow
def test_what_has_changed_is_found(project, pytester):
    project(
        """
import pytest, work
@pytest.mark.gate(time="20%")
def test_slower(benchmark): benchmark(work.one)
@pytest.mark.gate(time="20%")
def test_faster(benchmark): benchmark(work.other)
@pytest.mark.gate(time="50%")
def test_same(benchmark): benchmark(work.busy, 20000)
@pytest.mark.gate(time=None, memory_floor="1 KiB")
def test_larger(benchmark): benchmark(lambda: bytearray(work.SIZE))
@pytest.mark.xfail(strict=True, reason="known")
@pytest.mark.gate(time="20%")
def test_known(benchmark): benchmark(work.one)
""",
        WORK.format(one=20000, other=60000) + "SIZE = 100_000\n",
        WORK.format(one=60000, other=20000) + "SIZE = 120_000\n",
    )
    result = pytester.runpytest_inprocess(
        "--stackwise-against=base", "--stackwise-gate-report=out.json", "--junitxml=junit.xml"
    )
    result.assert_outcomes(failed=2, passed=2, xfailed=1)
    found = json.loads((pytester.path / "out.json").read_text())
    tests = {test["nodeid"].split("::")[1]: test for test in found["tests"]}
    assert {name: test["verdict"] for name, test in tests.items()} == {
        "test_slower": "REGRESSED",
        "test_faster": "IMPROVED",
        "test_same": "PASS",
        "test_larger": "REGRESSED",
        "test_known": "REGRESSED",
    }
    assert tests["test_slower"]["trials"]["time"]["decision"]["estimate"] > 0.2
    assert tests["test_slower"]["trials"]["time"]["decision"]["confirmed"]
    assert set(tests["test_larger"]["trials"]) == {"memory"}
    assert tests["test_larger"]["trials"]["memory"]["decision"]["estimate"] == pytest.approx(0.2, abs=0.01)
    assert found["balance"] == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there are no twins")
def test_later_rounds_begin_with_what_is_installed(project, pytester, monkeypatch):
    told = pytester.path / "told"
    monkeypatch.setenv("TOLD", str(told))
    tests = """
import os, sys, pytest, work
there = "numpy" in sys.modules
import numpy
@pytest.mark.gate(time="50%")
def test_one(benchmark):
    with open(os.environ["TOLD"], "a") as file:
        print(there, numpy.__name__ in sys.modules, "work" in sys.modules, file=file)
    benchmark(work.one)
"""
    project(tests, WORK.format(one=100, other=1), WORK.format(one=100, other=2))
    pytester.runpytest_inprocess("--stackwise-against=base").assert_outcomes(passed=1)
    first, *later = told.read_text().splitlines()
    assert later.pop(0) == first == "False True True"
    assert set(later) == {"True True True"}


@pytest.mark.slow
def test_two_models_in_one_file(project, pytester):
    project(
        """
import pytest, torch, work
from stackwise.benchmark import callable_workload
@pytest.mark.gate(time="20%")
@pytest.mark.min_tokens_per_second(1e12)
def test_it(throughput):
    one, three = torch.randn(256, 256), torch.randn(1024, 1024)
    old, new = (callable_workload(lambda x=x: x @ x, tokens=512) for x in (one, three))
    found = throughput(new, against=old)
    assert found.median > 0
def test_without(throughput):
    throughput(callable_workload(lambda: None))
""",
        "",
        "",
    )
    result = pytester.runpytest_inprocess("--stackwise-against=callable", "--stackwise-missing=fail", "-v")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "time REGRESSED: * -> * (* -> * tokens/s), *",
            "set-up error: *throughput got no `against`*",
            "REGRESSED * time * confirmed  * -> * tokens/s",
            "not judged beside a base: min_tokens_per_second of 1 test",
        ]
    )


def test_what_is_installed_is_not_compared_with_itself(project, pytester):
    project("def test_it(benchmark): benchmark(sum, range(100))\n", "OLD = 1\n", "NEW = 1\n")
    result = pytester.runpytest_inprocess("--stackwise-against=base", ONE_ROUND)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *installed code was compared with itself*"])


def test_file_that_the_base_cannot_import_does_not_affect_other_files(project, pytester):
    work = WORK.format(one=100, other=100)
    project("import work\ndef test_it(benchmark): benchmark(work.one)\n", work, work + "new = one\n")
    (pytester.path / "bench" / "test_new.py").write_text(
        "from work import new\ndef test_new(benchmark): benchmark(new)\n"
    )
    (pytester.path / "bench" / "test_broken.py").write_text(
        "import work\nif not hasattr(work, 'new'): raise RuntimeError('no answer')\n"
        "def test_it(benchmark): benchmark(work.new)\n"
    )
    result = pytester.runpytest_inprocess(
        "--stackwise-against=base", ONE_ROUND, "--stackwise-missing=create", "--benchmark-only"
    )
    result.assert_outcomes(passed=1, skipped=2)
    result.stdout.fnmatch_lines_random(
        [
            "crashed on base * bench/test_broken.py::test_it * RuntimeError: no answer (test_broken.py:2)",
            "missing on base * bench/test_new.py::test_new * not collected: ImportError: cannot import *",
            "INCONCLUSIVE * bench/test_work.py::test_it *",
        ]
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_is_an_interruption(number):
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(KeyboardInterrupt, match=number.name), _terminable():  # noqa: PT012
            os.kill(os.getpid(), number)
            time.sleep(60)
        assert signal.getsignal(number) is signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with _terminable():  # as under nohup
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["SIGTERM", "SIGINT"]
)
def test_interrupted(project, pytester, number, ends):
    # No process and no tree stays behind: the fixture looks for trees.
    project(
        """
import os, time, pathlib, work
def test_long(benchmark):
    def call():
        pathlib.Path(os.environ["SEEN"], str(os.getpid())).touch()
        time.sleep(0.05)
    benchmark(call)
""",
        "",
        "BETTER = 1\n",
    )
    seen = pytester.path / "seen"
    seen.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "--stackwise-against=base", "-p", "no:cacheprovider"],
        env=os.environ | {"SEEN": str(seen)},
        stdout=subprocess.PIPE,
        text=True,
        # A shell ignores SIGINT in what it starts in the background, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + HANG_SECONDS
    while len(list(seen.iterdir())) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    output, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, output
    assert "the run was interrupted: tests that were not decided are INCONCLUSIVE" in output
    pids = [int(path.name) for path in seen.iterdir()]
    assert len(pids) == 2, output
    assert all(map(ends, pids))


@pytest.mark.parametrize("option", [name.replace("_", "-") for name in options._GATE[1:]])
def test_no_option_is_ignored_where_there_is_no_base(pytester, option):
    config = pytester.parseconfig(f"--stackwise-{option}=1")
    with pytest.raises(pytest.UsageError, match=f"^--stackwise-{option}: allowed with --stackwise-against$"):
        create(config)
    # A side has those of `addopts` as well.
    config.pluginmanager.register(object(), "stackwise_side.plugin")
    assert create(config) is None


def test_options_of_the_configuration_file_wait_for_a_base(pytester):
    pytester.makeini("[pytest]\nstackwise_missing = fail\nstackwise_gate = time=3%\n")
    assert create(pytester.parseconfig()) is None
    found = create(pytester.parseconfig("--stackwise-against=main"))
    assert (found.asked.missing, found.asked.limits.time.tolerance) == ("fail", 0.03)


def test_unjudged_limits_are_reported(project, pytester, monkeypatch):
    wanted = {}

    def ran(base, head, tests, launch, *, missing, notes, asked, **_):
        wanted.update(asked)
        found = tuple(TestResult(test, "missing on base") for test in tests)
        return GateResult(base.name, head.name, found, missing=missing, notes=tuple(notes))

    monkeypatch.setattr(stackwise.gate.session, "run_gate", ran)
    work = WORK.format(one=100, other=100)
    project(
        """
import pytest
@pytest.mark.min_tokens_per_second(1e12)
@pytest.mark.max_memory("1 B")
def test_one(throughput): pass
@pytest.mark.min_tokens_per_second(1e12)
def test_two(throughput): pass
@pytest.mark.max_memory("1 B")
@pytest.mark.gate(memory="5%", floor="1us")
def test_other(benchmark): pass
""",
        work,
        work,
    )
    result = pytester.runpytest_inprocess("--stackwise-against=base", "--stackwise-missing=create")
    # That of the last one is judged in the processes of the sides, and nothing is of the memory of this one.
    result.assert_outcomes(passed=3)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        ["not judged beside a base: min_tokens_per_second of 2 tests, max_memory of 1 test"]
    )
    assert [wanted[f"bench/test_work.py::test_{name}"] for name in ("one", "other")] == [(), ("memory",)]


def test_collection_and_trees_are_part_of_the_time_limit(project, pytester, monkeypatch):
    limit = {}

    def ran(base, head, tests, launch, *, most_seconds, spent, **_):
        limit.update(most_seconds=most_seconds, spent=spent)
        return GateResult(base.name, head.name, tuple(TestResult(test, "not begun") for test in tests))

    monkeypatch.setattr(stackwise.gate.session, "run_gate", ran)
    project("import time\ntime.sleep(0.2)\ndef test_it(benchmark): pass\n", "", "NEW = 1\n")
    pytester.runpytest_inprocess("--stackwise-against=base", "--stackwise-gate-seconds=60")
    assert limit["most_seconds"] == 60.0
    assert limit["spent"] >= 0.2


def test_short_summary_has_test_change_and_limit_in_80_columns(project, pytester, monkeypatch):
    def ran(base, head, tests, launch, **_):
        slower = replace(of(Verdict.REGRESSED).trials["time"].decision, estimate=0.053, low=0.04, high=0.07)
        trial = replace(of(Verdict.REGRESSED).trials["time"], decision=slower)
        measured, late = tests
        found = (TestResult(measured, trials={"time": trial}), TestResult(late, "not begun"))
        return GateResult(base.name, head.name, found)

    monkeypatch.setattr(stackwise.gate.session, "run_gate", ran)
    monkeypatch.setenv("COLUMNS", "80")
    work = WORK.format(one=100, other=100)
    project("def test_step(benchmark): pass\ndef test_late(benchmark): pass\n", work, work + "new = one\n")
    result = pytester.runpytest_inprocess("--stackwise-against=base")
    lines = result.outlines
    assert "FAILED bench/test_work.py::test_step - time +5.30% > 2%" in lines
    assert "REGRESSED  bench/test_work.py::test_step  time +5.30% > 2%" in lines
    assert "gate: compares 2 tests with base" in lines
    assert not any("test_late" in line for line in lines)


def finished(result, status, *, interrupted=False, report=(), history=None):
    """The exit status that the gate makes of another one, and what it says that it wrote."""
    asked = options.GateOptions("base", None, Limits(), "warn", None, None, 600.0, report, history)
    gate = Gate(None, asked)
    gate.result, gate._interrupted = result, interrupted
    session = SimpleNamespace(exitstatus=status, testsfailed=int(status == 1))
    gate._failed_setups = sum(status == 1 and test.status == "set-up error" for test in result.tests[:1])
    gate.pytest_sessionfinish(session)
    return session.exitstatus, gate._written


def of(verdict):
    decision = Decision(verdict, 0.0, -0.01, 0.01, 0.97, 4, False, "")
    trial = TrialResult(decision, "s", 0.02, 0.01, (0.0,) * 4, (1e-3,) * 4, (1e-3,) * 4)
    return TestResult("a", trials={"time": trial})


@pytest.mark.parametrize(
    ("test", "codes"),
    [
        (TestResult("a", "skipped"), {0: 5, 7: 5, 1: 1, 2: 2}),
        (TestResult("a", "missing on base"), {0: 5}),
        (of(Verdict.INCONCLUSIVE), {0: 7, 1: 1, 2: 2}),
        # Of tests of other kinds, such as those of quality.
        (of(Verdict.PASS), {0: 0, 7: 7, 1: 1}),
        # Here it was expected to fail.
        (of(Verdict.REGRESSED), {0: 0}),
        # 0: it was expected to fail.
        (TestResult("a", "set-up error"), {1: 4, 0: 4, 7: 4, 2: 2}),
    ],
    ids=["skipped", "missing", "inconclusive", "pass", "regressed", "set-up error"],
)
def test_exit_codes(test, codes, monkeypatch):
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    result = GateResult("base", "head", (test,), missing="warn")
    assert {code: finished(result, code)[0] for code in codes} == codes


@pytest.mark.parametrize(("status", "code"), [(0, 1), (7, 1), (1, 1), (2, 2)])
def test_slower_suite_fails_a_run_in_which_no_test_fails(status, code, monkeypatch):
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    suite = replace(of(Verdict.REGRESSED), nodeid="(all tests together)")
    result = GateResult(
        "base", "head", (of(Verdict.INCONCLUSIVE), TestResult("b", "set-up error")), suite=suite
    )
    assert finished(result, status)[0] == code


def test_interrupted_run_is_reported_but_not_stored_in_history(tmp_path, monkeypatch):
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    result = GateResult("base", "head", (of(Verdict.PASS), TestResult("b", "not begun")))
    given = {"interrupted": True, "history": str(tmp_path / "history.db")}
    report, status = tmp_path / "out.json", pytest.ExitCode.INTERRUPTED
    assert finished(result, status, report=(report,), **given) == (
        status,
        [f"gate: wrote {report}", "gate: nothing was kept in the history, as the run was interrupted"],
    )
    assert GateResult.from_dict(json.loads(report.read_text())) == result
    assert list(tmp_path.iterdir()) == [report]
    code, [written] = finished(result, status, report=(report / "below.json",), **given)
    assert code == status and written.startswith("not written: ")

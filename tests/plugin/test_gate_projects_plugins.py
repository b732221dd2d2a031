"""The gate in projects with habits of their own: dependent tests, reruns, options, unittest, plugins."""

import shutil

import pytest

import stackwise.gate.session  # noqa: F401 - before a nested run: NumPy cannot be loaded twice

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

WORK = "def one():\n    return sum(range(1000))\n"
ONE_ROUND = "--stackwise-gate-seconds=0.001"


@pytest.fixture
def gate(repository, pytester):
    """Commit files as base, add a function in the head, and run the gate once: gate(files, *options)."""

    def gate(files, *options):
        repository({"work.py": WORK, **files}, {"work.py": f"{WORK}\n\ndef new():\n    return 1\n"})
        return pytester.runpytest_inprocess("--stackwise-against=base", ONE_ROUND, *options)

    return gate


@pytest.fixture
def only_plugin(monkeypatch):
    """Options that load this plugin, if it is installed, and no other: only_plugin(module) -> options."""

    def only_plugin(module):
        pytest.importorskip(module)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        return "-p", "pytest_stackwise.plugin", "-p", "pytest_benchmark.plugin", "-p", module

    return only_plugin


@pytest.mark.slow
def test_dependent_test_is_measured_after_the_earlier_tests_of_its_class(gate):
    tests = """
import work
class TestTable:
    rows = None
    def test_load(self):
        TestTable.rows = [work.one()]
    def test_query(self, benchmark):
        benchmark(TestTable.rows.index, TestTable.rows[0])
"""
    result = gate({"bench/test_it.py": tests})
    result.assert_outcomes(passed=1, skipped=1)
    assert result.ret == 7
    note = "bench/test_it.py::TestTable::test_query: measured after the earlier tests of its file, *"
    result.stdout.fnmatch_lines(["INCONCLUSIVE * bench/test_it.py::TestTable::test_query *", note])


def test_test_that_pytest_dependency_skips_is_measured_after_its_file(gate, only_plugin):
    tests = """
import pytest, work
@pytest.mark.dependency()
def test_load(): pass
@pytest.mark.dependency(depends=["test_load"])
def test_query(benchmark): benchmark(work.one)
"""
    result = gate({"bench/test_it.py": tests}, *only_plugin("pytest_dependency"))
    result.stdout.fnmatch_lines(["INCONCLUSIVE * bench/test_it.py::test_query *"])


RERUNS = {
    "protocol": """
import pytest
from _pytest.runner import runtestprotocol
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):  # as pytest-rerunfailures and flaky
    for attempt in range(3):
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        failed = any(report.failed for report in reports)
        for report in reports:
            if report.failed and attempt < 2:
                report.outcome = "rerun"
                item.ihook.pytest_runtest_logreport(report=report)
                break
            item.ihook.pytest_runtest_logreport(report=report)
        if not failed:
            break
    return True
""",
    "makereport": """
import pytest
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):  # as pytest-retry
    report = yield
    if report.when == "call" and report.failed and item.get_closest_marker("flaky"):
        item._initrequest()
        pytest.CallInfo.from_call(lambda: item.ihook.pytest_runtest_setup(item=item), when="setup")
        pytest.CallInfo.from_call(lambda: item.ihook.pytest_runtest_call(item=item), when="call")
    return report
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.flaky(retries=2))
def pytest_configure(config):
    config.addinivalue_line("markers", "flaky: run again")
""",
}
FAILS = """
import work
def test_fails(benchmark):
    benchmark(work.one)
    assert work.one() == 0
def test_neighbor(benchmark): benchmark(work.one)
"""


@pytest.mark.parametrize("kind", RERUNS)
def test_reruns_are_off_in_the_sides(gate, kind):
    result = gate({"bench/test_it.py": FAILS, "conftest.py": RERUNS[kind]})
    result.assert_outcomes(failed=1, skipped=1)
    assert "rerun" not in result.outlines[-1], "nor are they on in this run: a verdict does not change"
    failed = "set-up error *bench/test_it.py::test_fails * assert 499500 == 0*"
    result.stdout.fnmatch_lines_random([failed, "INCONCLUSIVE * bench/test_it.py::test_neighbor *"])


@pytest.mark.parametrize(
    ("plugin", "option"),
    [
        ("pytest_rerunfailures", "--reruns=2"),
        ("flaky.flaky_pytest_plugin", "--force-flaky"),
        ("pytest_retry.retry_plugin", "--retries=2"),
    ],
)
def test_reruns_of_a_real_plugin_are_off_in_the_sides(gate, only_plugin, plugin, option):
    result = gate({"bench/test_it.py": FAILS}, *only_plugin(plugin), option)
    result.assert_outcomes(failed=1, skipped=1)
    failed = "set-up error *bench/test_it.py::test_fails * assert 499500 == 0*"
    result.stdout.fnmatch_lines_random([failed, "INCONCLUSIVE * bench/test_it.py::test_neighbor *"])


def test_order_of_a_plugin_is_not_that_of_the_sides(gate):
    """As `--nf` in addopts, which sorts files by their time after all other plugins."""
    conftest = """
import pytest
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    yield
    if config.pluginmanager.hasplugin("stackwise-gate-side"):
        items.reverse()
"""
    tests = "".join(f"def test_{name}(benchmark): benchmark(work.one)\n" for name in "ab")
    result = gate({"bench/test_it.py": f"import work\n{tests}", "conftest.py": conftest})
    result.stdout.fnmatch_lines(["INCONCLUSIVE * bench/test_it.py::test_a *"])
    assert result.ret == 7


@pytest.mark.slow
@pytest.mark.skipif(pytest.version_tuple < (9,), reason="pytest 9 reads pytest.toml")
def test_options_of_pytest_toml_are_those_of_the_sides(gate):
    toml = '[pytest]\npythonpath = ["."]\naddopts = ["--memray", "--sizes", "3"]\n'
    conftest = """
import sys
def pytest_addoption(parser):
    parser.addoption("--sizes", nargs="+", type=int)
    parser.addoption("--memray", action="store_true")  # as pytest-memray has it
def pytest_generate_tests(metafunc):
    assert not metafunc.config.option.memray or metafunc.config.pluginmanager.hasplugin("stackwise-gate")
    metafunc.parametrize("size", metafunc.config.getoption("sizes"))
"""
    tests = "import work\ndef test_it(benchmark, size): benchmark(work.one)\n"
    files = {"bench/test_it.py": tests, "conftest.py": conftest, "pytest.toml": toml}
    result = gate(files)
    result.stdout.fnmatch_lines(["INCONCLUSIVE * bench/test_it.py::test_it?3? *"])


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--sizes", "3", "4", "-xq"], ["@arguments.txt"]], ids=["line", "file"])
def test_options_of_a_conftest_are_those_of_the_sides(gate, options):
    conftest = """
def pytest_addoption(parser):
    parser.addoption("--sizes", nargs="+", type=int, default=[1])
def pytest_generate_tests(metafunc):
    metafunc.parametrize("size", metafunc.config.getoption("sizes"))
"""
    files = {
        "bench/test_it.py": "import work\ndef test_it(benchmark, size): benchmark(work.one)\n",
        "conftest.py": conftest,
        "arguments.txt": "--sizes\n3\n4\n",
    }
    result = gate(files, *options)
    result.assert_outcomes(skipped=2)
    # The first round ends with its first test: the time is short.
    result.stdout.fnmatch_lines(["INCONCLUSIVE * bench/test_it.py::test_it?3? *"])


def test_unittest_class_with_a_benchmark_for_all_is_gated(gate):
    tests = """
import unittest, pytest, work
class TestIt(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def with_benchmark(self, benchmark):
        self.benchmark = benchmark
    def setUp(self):
        self.rows = [work.one()]
    def tearDown(self):
        del self.rows
    def test_a_plain_one(self):
        self.assertTrue(self.rows)
    def test_b_benchmark(self):
        self.benchmark(self.rows.index, self.rows[0])
    @unittest.skip("not today")
    def test_c_skipped(self): pass
class TestAsync(unittest.IsolatedAsyncioTestCase):
    async def test_plain(self):
        assert work.one()
"""
    result = gate({"bench/test_it.py": tests}, "-rs")
    result.assert_outcomes(passed=2, skipped=2)
    assert result.ret == 7
    result.stdout.fnmatch_lines(
        [
            "INCONCLUSIVE * bench/test_it.py::TestIt::test_b_benchmark *",
            "bench/test_it.py::TestIt::test_a_plain_one: benchmark or throughput is requested and not *",
        ]
    )


ONE_TEST = {"bench/test_it.py": "import work\ndef test_it(benchmark): benchmark(work.one)\n"}
COVERAGE = """
import pytest
from types import SimpleNamespace
class Coverage:  # as pytest-cov
    options = SimpleNamespace(cov_fail_under=90)
    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session):
        yield
        session.testsfailed += self.options.cov_fail_under is not None
        return True
def pytest_configure(config):
    if not config.pluginmanager.hasplugin("stackwise_side.plugin"):
        config.pluginmanager.register(Coverage(), "_cov")
"""


def test_coverage_is_not_judged_in_a_run_without_benchmarks(gate):
    result = gate(ONE_TEST | {"conftest.py": COVERAGE})
    assert result.ret == 7
    result.stdout.fnmatch_lines(["--cov-fail-under is not judged: *"])


@pytest.mark.parametrize(
    ("plugin", "options", "note"),
    [
        ("pytest_cov.plugin", ["--cov=work", "--cov-fail-under=99"], "--cov-fail-under is not judged: *"),
        ("pytest_timeout", ["--session-timeout=0.01"], "--session-timeout is not judged: *"),
        ("pytest_timeout", ["--timeout=0.5"], "INCONCLUSIVE: *"),
        ("pytest_fail_slow", ["--fail-slow=0.01s"], "INCONCLUSIVE: *"),
        ("pytest_forked", ["--forked"], "INCONCLUSIVE: *"),
    ],
)
def test_real_plugin_does_not_judge_runs_and_sides(gate, only_plugin, plugin, options, note):
    result = gate(ONE_TEST, *only_plugin(plugin), *options)
    assert result.ret == 7
    result.stdout.fnmatch_lines(["INCONCLUSIVE * bench/test_it.py::test_it *", note])


def test_options_of_pytest_benchmark_without_effect_are_named(gate, pytester):
    result = gate(ONE_TEST, "--benchmark-json=out.json", "--benchmark-autosave", "-W", "error")
    assert result.ret == 7
    result.stdout.fnmatch_lines(["--benchmark-json, --benchmark-autosave: without effect, *"])
    assert not (pytester.path / "out.json").exists()


IMPATIENT = """
import time
import pytest
@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):  # as pytest-fail-slow
    report = yield
    if report.passed and call.duration > 0.1:
        report.outcome, report.longrepr = "failed", "too slow"
    return report
@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):  # as --session-timeout of pytest-timeout
    yield
    if item.config.pluginmanager.hasplugin("stackwise_side.plugin"):
        item.session.shouldfail = "the session takes too long"
    return True
"""


@pytest.mark.slow
def test_time_of_a_test_and_a_session_is_not_judged_in_the_sides(gate):
    tests = """
import work
class TestIt:
    ready = False
    def test_first(self):
        TestIt.ready = True
    def test_it(self, benchmark):
        assert TestIt.ready
        benchmark(work.one)
"""
    result = gate({"bench/test_it.py": tests, "conftest.py": IMPATIENT})
    result.stdout.fnmatch_lines(["INCONCLUSIVE * bench/test_it.py::TestIt::test_it *"])
    assert result.ret == 7


def test_timeout_of_faulthandler_does_not_end_a_side_that_waits(gate):
    ini = "[pytest]\npythonpath = .\nfaulthandler_timeout = 0.2\nfaulthandler_exit_on_timeout = true\n"
    result = gate(ONE_TEST | {"pytest.ini": ini})
    assert result.ret == 7
    result.stdout.fnmatch_lines(["INCONCLUSIVE * bench/test_it.py::test_it *"])


def test_runtime_warnings_of_the_sides_are_shown(gate):
    tests = """
import warnings, work
async def coroutine(): pass
def test_it(benchmark):
    @benchmark
    def call():
        coroutine()
        warnings.warn("not shown")
"""
    result = gate({"bench/test_it.py": tests})
    text = "RuntimeWarning: coroutine 'coroutine' was never awaited (test_it.py:*) on base and head"
    result.stdout.fnmatch_lines([f"bench/test_it.py::test_it: {text}"])
    result.stdout.no_fnmatch_line("*not shown*")

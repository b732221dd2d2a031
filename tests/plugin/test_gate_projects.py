"""The gate in projects whose tests, layout or settings are unusual."""

import shutil

import pytest

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

ONE_ROUND = "--stackwise-gate-seconds=0.001"
WORK = "def one(): return sum(range(1000))\n"
BENCH = "import work\ndef test_it(benchmark): benchmark(work.one)\n"


def test_frozen_clocks_do_not_stop_the_measurement(repository, run_apart):
    """As freezegun does it: in all loaded modules, also of the user's run."""
    conftest = """
import sys, time
names = ["monotonic", "perf_counter", "perf_counter_ns", "process_time", "thread_time", "time"]
def pytest_collection_finish():
    frozen = {id(getattr(time, name)): name for name in names}
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in frozen:
                setattr(module, name, lambda: 1)
"""
    base = {"work.py": WORK, "bench/test_work.py": BENCH, "conftest.py": conftest}
    repository(base, {"work.py": "\n" + WORK})
    result = run_apart("--stackwise-against=base", ONE_ROUND, "-s")
    result.stdout.fnmatch_lines(["INCONCLUSIVE * bench/test_work.py::test_it * time * 1 round"])


def test_benchmark_that_only_head_skips_is_no_pass(repository, run_apart):
    bench = """
import pytest, work
def test_it(benchmark): benchmark(work.one)
@pytest.mark.skipif(not hasattr(work, "fast"), reason="no fast path")
def test_fast(benchmark): benchmark(work.fast)
"""
    repository({"work.py": WORK + "fast = one\n", "bench/test_work.py": bench}, {"work.py": WORK})
    result = run_apart("--stackwise-against=base", ONE_ROUND, "-k", "fast")
    assert result.ret == 5
    result.stdout.fnmatch_lines(["skipped on head * no fast path; the base runs it"])

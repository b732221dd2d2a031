"""A run of the gate that ends before its verdict never has exit code 0."""

import os
import shutil

import pytest

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

BENCH = "import work\ndef test_it(benchmark): benchmark(work.one)\n"
WORK = "def one(): return sum(range(1000))\n"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("work.py", WORK + "import os; os._exit(0)\n", "*work.py:2 called os._exit(0)*"),
        ("conftest.py", "import os; os._exit(0)\n", "*conftest.py:1 called os._exit(0)*"),
        ("conftest.py", "import sys; sys.exit(0)\n", "*a conftest called sys.exit(0)*"),
    ],
    ids=["module", "conftest", "sys.exit"],
)
def test_end_during_import_is_a_usage_error(repository, run_apart, file, text, message):
    repository({"work.py": WORK, "bench/test_work.py": BENCH}, {file: text})
    result = run_apart("--stackwise-against=base")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --stackwise-against: {message}"])


def test_run_without_a_comparison_is_a_usage_error(repository, run_apart):
    hook = "import pytest\ndef pytest_collection_finish(session): pytest.exit('enough', returncode=0)\n"
    repository({"work.py": WORK, "bench/test_work.py": BENCH}, {"conftest.py": hook})
    result = run_apart("--stackwise-against=base")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["gate: nothing was compared: the run ended before the comparison"])


@pytest.mark.parametrize(
    ("work", "code"),
    [
        ("def one(): 1 / 0\n", pytest.ExitCode.TESTS_FAILED),
        ("def one(): yield\n", pytest.ExitCode.USAGE_ERROR),
    ],
    ids=["crash", "set-up error"],
)
def test_failure_that_no_test_reports_fails_the_run(repository, run_apart, work, code):
    repository({"work.py": WORK, "bench/test_work.py": BENCH}, {"work.py": work})
    assert run_apart("--stackwise-against=base", "--setup-only").ret == code


def test_list_of_tests_needs_no_comparison(repository, run_apart):
    repository({"work.py": WORK, "bench/test_work.py": BENCH}, {})
    assert run_apart("--stackwise-against=base", "--collect-only").ret == pytest.ExitCode.OK


def test_exit_is_restored_after_the_run(repository, pytester):
    repository({"work.py": WORK, "bench/test_work.py": BENCH}, {})
    before = os._exit
    pytester.runpytest_inprocess("--stackwise-against=nowhere")
    assert os._exit is before


def test_exit_of_a_run_without_a_base_is_its_own(pytester, run_apart):
    pytester.makeconftest("import os; os._exit(0)\n")
    assert run_apart().ret == 0

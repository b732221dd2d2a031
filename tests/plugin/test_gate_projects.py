"""The gate in projects with habits of their own: dependent tests, reruns, options, unittest, other plugins."""

import os
import shutil
import subprocess

import pytest

import stackwise.gate.session  # noqa: F401 - before a nested run: NumPy cannot be loaded twice

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

WORK = "def one():\n    return sum(range(1000))\n"
ONE_ROUND = "--stackwise-gate-seconds=0.001"


def git(folder, *arguments):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-C", str(folder), *arguments]
    subprocess.run(command, check=True, capture_output=True, env=environment)


@pytest.fixture
def gate(pytester, monkeypatch, tmp_path_factory):
    """Commit files as base, add a function in the head, and run the gate once: gate(files, *options)."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("scratch")))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)

    def gate(files, *options):
        ini = {"pytest.ini": "[pytest]\npythonpath = .\n"}
        for name, text in (ini | {"work.py": WORK} | files).items():
            (pytester.path / name).parent.mkdir(exist_ok=True)
            (pytester.path / name).write_text(text)
        git(pytester.path, "init", "-q")
        git(pytester.path, "add", "-A")
        git(pytester.path, "commit", "-qm", "base")
        (pytester.path / "work.py").write_text(f"{WORK}\n\ndef new():\n    return 1\n")
        return pytester.runpytest_inprocess("--stackwise-against=HEAD", ONE_ROUND, *options)

    return gate


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
    note = "bench/test_it.py::TestTable::test_query: measured after the earlier tests of the file, *"
    result.stdout.fnmatch_lines(["INCONCLUSIVE * bench/test_it.py::TestTable::test_query *", note])

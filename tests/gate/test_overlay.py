"""The test files of head on both sides, and the changes that they hide."""

import shutil
from pathlib import Path

import pytest

from stackwise.gate.overlay import lay_over, overlay_parts
from tests.gate.small_repository import FAST, ONE_ROUND, SLOW, commit, run_gate, write

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
NAMED = '[project]\nname = "perf"\n'


@pytest.mark.parametrize(
    ("files", "test", "expected"),
    [
        (["bench/sizes.py"], "bench/test_it.py", ["bench"]),
        (["bench/__init__.py"], "bench/test_it.py", ["bench"]),
        (["bench/__init__.py", "bench/perf/x.py"], "bench/perf/test_it.py", ["bench"]),
        (["perf/core.py"], "perf/tests/test_it.py", ["perf/tests"]),
        (["engine/__init__.py"], "engine/tests/test_it.py", ["engine/tests"]),
        (["engine/__init__.py", "engine/perf/x.py"], "engine/perf/test_it.py", ["engine/perf/test_it.py"]),
        (["src/perf/core.py"], "src/perf/test_it.py", ["src/perf/test_it.py"]),
        (["perf/core.py", "pyproject.toml"], "perf/test_it.py", ["perf/test_it.py"]),
        (["lib/pyproject.toml"], "lib/perf/test_it.py", ["lib/perf/test_it.py"]),
        (["perf/pyproject.toml"], "perf/engine/test_it.py", ["perf/engine/test_it.py"]),
        (["benchmark/core.py"], "benchmark/test_it.py", ["benchmark/test_it.py"]),
        (["engine/t_test.py"], "engine/test_it.py", ["engine/test_it.py"]),
        (["engine/test_help.py"], "engine/test_it.py", ["engine/test_it.py", "engine/test_help.py"]),
    ],
)
def test_parts_are_tests_and_never_modules_of_a_package(files, test, expected, tmp_path):
    write(tmp_path, {name: NAMED if name.endswith(".toml") else "def t_test(): pass\n" for name in files})
    write(tmp_path, {test: "def test_it(benchmark): pass\n"})
    parts = overlay_parts(tmp_path, [Path(test)], {"benchmark"})
    configuration = ("conftest.py", ".ini", ".toml", ".cfg")
    assert {str(part) for part in parts if not part.name.endswith(configuration)} == set(expected)


def test_laid_over_are_all_files_but_those_of_a_build(tmp_path):
    head, base = tmp_path / "head", tmp_path / "base"
    write(head, {"bench/test_it.py": "new", "bench/sizes.py": "new", "bench/fresh.py": "", "same.py": "same"})
    write(base, {"bench/test_it.py": "old", "bench/sizes.py": "old", "bench/gone.py": "", "same.py": "same"})
    write(base, {"bench/_core.so": "built"})
    (head / "bench" / "data").symlink_to("elsewhere")
    write(base, {"bench/data/large.bin": "old"})
    tests, old = [Path("bench/test_it.py")], [Path("bench/gone.py"), Path("bench/data/large.bin")]

    hidden = lay_over(head, base, [Path("bench"), Path("same.py")], tests, old)

    assert hidden == [Path("bench/sizes.py")]
    names = {path.name for path in (base / "bench").iterdir()}
    assert names == {"_core.so", "data", "fresh.py", "sizes.py", "test_it.py"}
    assert (base / "bench" / "sizes.py").read_text() == (base / "bench" / "test_it.py").read_text() == "new"
    assert (base / "bench" / "data").readlink() == Path("elsewhere")


@pytest.fixture
def project(tmp_path):
    """A repository with a folder `perf` of tests and code that became slower; (more files) -> its folder."""
    root = tmp_path / "project"
    test = "import engine\nfrom perf.core import work\ndef test_it(benchmark): benchmark(work)\n"

    def of(base, head):
        files = {"pytest.ini": "[pytest]\npythonpath = .\n", "engine.py": "", "perf/test_core.py": test}
        commit(root, {**files, "perf/core.py": FAST, **base}, "base")
        commit(root, {"perf/core.py": SLOW, **head})
        return root

    return of


@pytest.mark.slow
@needs_git
def test_a_hidden_change_alone_is_nothing_to_compare(project):
    root = project({}, {"README.md": "news", "unused.py": "NEW = 1\n", "ci.yml": "a: 1\n"})
    write(root, {".benchmarks/0001.json": "{}"})
    code, result, output = run_gate(root, tests="perf")
    assert code == 5, output
    assert result["tests"][0]["status"] == "skipped"
    assert result["tests"][0]["detail"].startswith(
        "nothing to compare: perf/core.py: taken from head on both sides"
    )


@pytest.mark.slow
@needs_git
@pytest.mark.parametrize(
    ("engine", "change"),
    [
        ("", {"engine.py": "NEW = 1\n"}),
        ("open('data.txt').close()\n", {"data.txt": "new"}),
        ("import subprocess; subprocess.run(['sh', 'run.sh'])\n", {"run.sh": "# new\n"}),
    ],
    ids=["module", "data", "script"],
)
def test_a_hidden_change_beside_another_is_told(project, engine, change):
    root = project({"engine.py": engine, "data.txt": "", "run.sh": ""}, change)
    code, result, output = run_gate(root, ONE_ROUND, tests="perf")
    assert code == 7, output
    assert any(note.startswith("perf/core.py: taken from head on both sides") for note in result["notes"]), (
        output
    )


@pytest.mark.slow
@needs_git
def test_a_hidden_change_beside_a_changed_build_is_told(project):
    """As of an extension, whose changed source no side opens."""
    files = {"engine.py": "open('built.txt').close()\n", "source.txt": "", ".gitignore": "built.txt\n"}
    root = project(files, {"source.txt": "new"})
    write(root, {"built.txt": ""})
    code, _, output = run_gate(root, ONE_ROUND, "--stackwise-build=cp source.txt built.txt", tests="perf")
    assert code == 7, output


@pytest.mark.slow
@needs_git
def test_code_beside_tests_in_a_package_of_the_project_is_compared(project):
    code, result, output = run_gate(project({"pyproject.toml": NAMED}, {}), tests="perf")
    assert code == 1, output
    assert result["verdict"] == "REGRESSED"

"""The repository that bench.gate compares commits of, and the calls in it."""

import importlib
import subprocess
import sys

import pytest

from bench.gate.repository import BASE, Added, Repository
from bench.gate.suite.subject.effect import NAMES
from bench.gate.suite.subject.work import make, prepare


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    branches = {"same": Added(), "more": Added({"python": 7}, {"memory": 0.5})}
    return Repository.create(tmp_path_factory.mktemp("gate") / "repository", branches, ("python", "memory"))


def git(folder, *arguments):
    return subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.split()


def test_each_branch_is_a_child_of_the_base(repository):
    base = git(repository.origin, "rev-parse", BASE)
    for branch in ("same", "more"):
        tree = repository.tree(branch)
        assert git(tree, "rev-parse", "HEAD~1") == git(tree, "rev-parse", BASE) == base
        assert git(tree, "branch", "--show-current") == [branch]
        assert git(tree, "status", "--porcelain") == []


def test_branches_differ_by_what_is_added(repository):
    for branch in ("same", "more"):
        assert git(repository.tree(branch), "diff", "--name-only", BASE) == ["subject/effect.py"]

    def constants(branch):
        namespace = {}
        exec((repository.tree(branch) / "subject/effect.py").read_text(), namespace)
        return namespace["NAMES"], namespace["ITERATIONS"], namespace["SLEEP_SECONDS"]

    assert constants("same") == constants(BASE) == (("python", "memory"), {}, {})
    assert constants("more") == (("python", "memory"), {"python": 7}, {"memory": 0.5})


def test_paths_are_equally_long(repository, tmp_path):
    lengths = {len(str(repository.tree(branch))) for branch in (BASE, "same", "more")}
    assert len(lengths) == 1
    with pytest.raises(ValueError, match="got 'longer'; allowed: names of 4 characters"):
        Repository.create(tmp_path, {"longer": Added()}, ("python",))


def test_an_unknown_branch(repository):
    with pytest.raises(ValueError, match="got 'none'"):
        repository.tree("none")


def test_it_is_made_anew(repository):
    before = repository.tree("same")
    (before / "left_over").touch()
    again = Repository.create(
        repository.folder,
        {"same": Added(), "more": Added({"python": 7}, {"memory": 0.5})},
        ("python", "memory"),
    )
    assert not (again.tree("same") / "left_over").exists()


def test_benchmarks_run_under_pytest_benchmark(repository):
    command = [sys.executable, "-m", "pytest", "bench/test_speed.py", "-q", "--benchmark-disable"]
    plugins = ["-p", "no:stackwise", "-p", "no:codspeed"]
    done = subprocess.run(
        [*command, *plugins], cwd=repository.tree("same"), capture_output=True, text=True, check=False
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_calls_do_something_with_and_without_more(name):
    work = prepare(name)
    assert work(0) is not None
    assert work(5) is not None
    assert make(name)() is not None


def test_an_iteration_of_pure_python_is_one_more_step():
    work, added = prepare("python"), prepare("python")
    total = 0
    for i in range(20_000 + 3):
        total = (total * 31 + i) % 1_000_003
    assert added(3) == total
    assert work(0) != added(3)


def test_sleep_is_as_long_as_the_commit_says(monkeypatch):
    slept = []
    module = importlib.import_module("bench.gate.suite.subject.work")
    monkeypatch.setattr(module, "SLEEP_SECONDS", {"python": 0.25})
    monkeypatch.setattr(module.time, "sleep", slept.append)
    make("python")()
    make("memory")()
    assert slept == [0.25]

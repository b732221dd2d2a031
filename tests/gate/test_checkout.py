"""What is checked out, as git says, and the CI where git does not."""

import subprocess

import pytest

from stackwise.gate.git import Checkout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for name in ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME"):
        monkeypatch.delenv(name, raising=False)

    def git(*arguments):
        settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", *settings, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "--initial-branch=work")
    (tmp_path / "a.txt").write_text("one")
    git("add", "a.txt")
    git("commit", "-m", "one")
    return tmp_path, git


def test_commit_and_branch(repository):
    folder, git = repository
    assert Checkout.of(folder) == Checkout(git("rev-parse", "HEAD"), "work")
    (folder / "new.txt").write_text("untracked")
    assert "dirty" not in Checkout.of(folder).commit
    (folder / "a.txt").write_text("two")
    assert Checkout.of(folder).commit == git("rev-parse", "HEAD") + "-dirty"


def test_the_ci_names_the_branch_of_a_commit(repository, monkeypatch):
    folder, git = repository
    git("checkout", "--detach")
    assert Checkout.of(folder).branch == ""
    monkeypatch.setenv("GITHUB_REF_NAME", "12/merge")
    assert Checkout.of(folder).branch == "12/merge"
    monkeypatch.setenv("GITHUB_HEAD_REF", "feature")
    assert Checkout.of(folder).branch == "feature"


def test_no_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("CI_COMMIT_REF_NAME", "main")
    assert Checkout.of(tmp_path) == Checkout("", "main")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Checkout.of(tmp_path).commit == ""


def test_repository_of_a_hook_is_not_that_of_the_folder(repository, monkeypatch):
    folder, git = repository
    commit = git("rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert Checkout.of(folder).commit == commit

"""Git: calls of git with the user's configuration, and the commit and branch of a folder."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["Checkout", "run_git"]

# Variables that name a repository, its index or its objects. Git sets them while a hook runs.
_OF_A_REPOSITORY = frozenset(
    f"GIT_{name}"
    for name in (
        "ALTERNATE_OBJECT_DIRECTORIES",
        "COMMON_DIR",
        "DIR",
        "GRAFT_FILE",
        "IMPLICIT_WORK_TREE",
        "INDEX_FILE",
        "INTERNAL_SUPER_PREFIX",
        "NAMESPACE",
        "OBJECT_DIRECTORY",
        "PREFIX",
        "QUARANTINE_PATH",
        "SHALLOW_FILE",
        "WORK_TREE",
    )
)
# Variables with the name of the branch, since a CI checks out a commit without its branch. The branch of a
# pull request precedes its target branch.
_BRANCHES = ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME")


def run_git(
    folder: Path, *arguments: str, index: Path | None = None, given: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run git in a folder and return the completed process, even if git fails.

    File names are decoded as `os.fsdecode` does, so every file can be opened by its name.

    Args:
        folder: a repository, or a folder in a repository.
        arguments: arguments of git.
        index: index file to use; None: the index of the repository.
        given: text for the standard input.

    Raises:
        OSError: git is not installed.
    """
    environment = {key: value for key, value in os.environ.items() if key not in _OF_A_REPOSITORY}
    environment["GIT_OPTIONAL_LOCKS"] = "0"  # otherwise a read would refresh the index
    if index is not None:
        environment["GIT_INDEX_FILE"] = str(index)
    return subprocess.run(  # noqa: S603
        ["git", "-C", str(folder), *arguments],  # noqa: S607
        input=given,
        capture_output=True,
        encoding=sys.getfilesystemencoding(),
        errors=sys.getfilesystemencodeerrors(),
        check=False,
        env=environment,
    )


@dataclass(frozen=True)
class Checkout:
    """Commit and branch of a folder.

    Attributes:
        commit: commit hash, with "-dirty" if tracked files have changed; "" outside of a repository.
        branch: name of the branch; "" if unknown.
    """

    commit: str
    branch: str

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Return the checkout of a folder."""
        commit = _git(folder, "rev-parse", "HEAD")
        if commit and _git(folder, "status", "--porcelain", "--untracked-files=no"):
            commit += "-dirty"
        branch = _git(folder, "symbolic-ref", "--short", "--quiet", "HEAD")
        said = (os.environ.get(name, "") for name in _BRANCHES)
        return cls(commit, branch or next(filter(None, said), ""))


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = run_git(folder, *arguments)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""

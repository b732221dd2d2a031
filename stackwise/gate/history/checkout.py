"""Checkout: commit and branch of a folder, from git and the CI."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from stackwise.gate.git import run_git

__all__ = ["Checkout"]

# Variables with the name of the branch, since a CI checks out a commit without its branch. The branch of a
# pull request precedes its target branch.
_BRANCHES = ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME")


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

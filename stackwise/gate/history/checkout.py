"""Checkout: which commit of which branch a folder has, as git and the CI say."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from stackwise.gate.git import run_git

__all__ = ["Checkout"]

# A CI has checked out a commit without its branch, and says here which one it is. The branch of a pull
# request comes before the one that it is to be merged into.
_BRANCHES = ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME")


@dataclass(frozen=True)
class Checkout:
    """What is checked out.

    Attributes:
        commit: its hash, with "-dirty" where files were changed; "" outside of a repository.
        branch: its name; "" where nobody says.
    """

    commit: str
    branch: str

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Of a folder."""
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

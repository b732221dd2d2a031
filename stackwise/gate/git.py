"""Git: calls of git in a given repository, with the user's configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["run_git"]

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

"""Mixing: reasons why a side did not measure its own code with its own data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["STRAY", "Used", "why_mixed", "written_by_both"]

STRAY = (
    "so the gate would measure code that is not in the tree of this side. Install the project editable "
    "(pip install -e .), or add its source folder (-o pythonpath=src). If meson-python or scikit-build-core "
    "installed it editable, their import hooks win over PYTHONPATH: uninstall it first (pip uninstall NAME)"
)
_FOREIGN = (
    "which belongs to the working tree or to the other side, so the gate would measure another revision. "
    "Name the file relative to the test file, or build it with --stackwise-build"
)
_SHARED = (
    "which changed during the run, so one side may have read the data of the other. Derive its name from "
    "STACKWISE_SIDE, or use tmp_path"
)
_SLACK = 0.1  # seconds by which the timestamp of a file may precede the write


@dataclass
class Used:
    """Absolute paths of the files outside of its tree that the process of a side has used so far.

    Attributes:
        stray: module that was imported from outside the tree, with its path; "" if no module was.
        foreign: files of the other side or of the working tree that the process read or ran.
        read: other files that the process read, without installed files.
        written: other files that the process wrote, including files of the working tree.
    """

    stray: str = ""
    foreign: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)

    def add(self, stray: str, files: Mapping[str, Sequence[str]]) -> None:
        """Add the module and the files that the process reported at the end of a test."""
        self.stray = self.stray or stray
        self.foreign.update(files["foreign"])
        self.read.update(files["read"])
        self.written.update(files["written"])


def why_mixed(sides: Mapping[str, Used], run_began: float, round_began: float) -> str:
    """Return the reason why the comparison of the sides is not valid, or "" if no reason is known.

    Args:
        sides: files used by base and by head, in this order.
        run_began: start time of the user's run, which imports the tests and may write files as well.
        round_began: start time of the round. Files that the run writes into hidden folders before this time,
            such as ~/.cache/matplotlib, are settings and caches of libraries.
    """
    for role, used in sides.items():
        if used.stray:
            return f"{role} imported {used.stray}, {STRAY}"
        if used.foreign:
            return f"{role} used {min(used.foreign)}, {_FOREIGN}"
    base, head = sides.values()
    crossed = (base.read & (head.read | head.written)) | (head.read & base.written)
    for path in sorted(crossed):
        hidden = any(part.startswith(".") for part in Path(path).parts)
        began = round_began if hidden else run_began
        if _changed(Path(path), began, path in base.written | head.written):
            return f"base and head used {path}, {_SHARED}"
    return ""


def written_by_both(sides: Mapping[str, Used]) -> list[str]:
    """Return the files that both sides wrote."""
    base, head = sides.values()
    return sorted(base.written & head.written)


def _changed(path: Path, began: float, written: bool) -> bool:
    """Return True if a file was written after `began` and has content, unlike an empty lock file."""
    try:
        status = path.stat()
    except OSError:
        return written
    return status.st_size > 0 and status.st_mtime >= began - _SLACK

"""Temporary folder: removed at its end, or by the next run if its own run was killed."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["PREFIX", "temporary_folder"]

PREFIX = "stackwise-gate-"
_LOCK = ".lock"  # locked as long as the process that made the folder lives


@contextmanager
def temporary_folder(place: Path | None = None) -> Iterator[Path]:
    """Make a folder in `place` (default: TMPDIR) and remove it at the end. Remove those of killed runs."""
    place = place or Path(tempfile.gettempdir())
    _remove_abandoned(place)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place)).resolve()
    try:
        unlocked = folder / "unlocked"  # as `_LOCK`, another run could remove it before it is locked
        with unlocked.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            unlocked.rename(folder / _LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(place: Path) -> None:
    """Remove the folders of ended processes, whose lock no process holds."""
    for lock in place.glob(f"{PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("r+") as file:  # of another user, or removed
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)

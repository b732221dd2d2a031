"""Temporary folder: removed at its end, or by the next process if its own was killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stackwise.support.lock import file_lock

__all__ = ["temporary_folder"]

_LOCK = ".lock"  # held while the process that made the folder lives


@contextmanager
def temporary_folder(prefix: str, place: Path | None = None) -> Iterator[Path]:
    """Create a folder and remove it at the end. First remove folders of killed processes.

    If the file system has no locks, folders of killed processes remain. So does a folder whose process was
    killed while it created or removed the folder.

    Args:
        prefix: start of the folder's name. Leftovers are recognized by it.
        place: parent of the folder, created if it does not exist. None: TMPDIR.
    """
    place = place or Path(tempfile.gettempdir())
    place.mkdir(parents=True, exist_ok=True)
    for path in place.glob(f"{prefix}*/{_LOCK}"):
        with suppress(OSError), file_lock(path, blocking=False):  # held, or removed
            if path.stat().st_uid == os.geteuid():
                shutil.rmtree(path.parent, ignore_errors=True)
    creator = os.getpid()
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place)).resolve()
    lock = file_lock(folder / "unlocked", blocking=False)
    try:
        with suppress(OSError):
            lock.acquire()
            # Created as `_LOCK`, another process could take the folder for a leftover before it is locked.
            (folder / "unlocked").rename(folder / _LOCK)
        yield folder
    finally:
        if os.getpid() == creator:  # a forked child may leave the block by an exception
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()

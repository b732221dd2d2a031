"""Lock: exclusive file lock between processes. The system releases it if its process ends."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock

__all__ = ["file_lock"]


def file_lock(path: Path, *, blocking: bool = True) -> FileLock:
    """Return the exclusive lock of a file, not yet acquired. Acquiring it creates the file and its folder.

    Two locks of one file exclude each other, also within a process. One lock object can be acquired several
    times, also by other threads. A forked child does not inherit it.

    Args:
        path: the lock file. It remains after the release.
        blocking: False: raise `filelock.Timeout`, an OSError, if the lock is held.

    Raises:
        OSError: when the lock is acquired: the file cannot be written, or its file system has no locks.
    """
    # The soft lock of other file systems would remain after a kill.
    return FileLock(path, thread_local=False, blocking=blocking, fallback_to_soft=False)

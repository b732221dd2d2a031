"""Lock: lock file that one process at a time holds. The system releases it if its process ends."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock

__all__ = ["file_lock"]


def file_lock(path: Path, *, blocking: bool = True) -> FileLock:
    """Return the exclusive lock of a file, not yet acquired. Acquiring it creates the file and its folder.

    Each call returns a lock that excludes all others of the same file, also in the same process. The object
    that holds it may acquire it again, and any thread may release it. A forked child does not inherit it.

    Args:
        path: the lock file. It remains after the release.
        blocking: False: raise `filelock.Timeout`, an OSError, if the lock is held.

    Raises:
        OSError: when the lock is acquired: the file cannot be written, or its file system has no locks.
    """
    # The soft lock of other file systems would remain after a kill.
    return FileLock(path, thread_local=False, blocking=blocking, fallback_to_soft=False)

"""Lock wait: file whose lock a silent process waits for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["awaited_lock"]


def awaited_lock(session: int) -> str:
    """Return the path of the file whose lock (flock, lockf) a process of a session waits for.

    Args:
        session: process ID of the session leader.

    Returns:
        the path; "a file" if the path is unknown; "" if no process waits, or the system is not Linux.
    """
    for pid, inode in _waiting():
        with suppress(OSError):
            if os.getsid(pid) == session:
                return _open_file(pid, inode) or "a file"
    return ""


def _waiting() -> Iterator[tuple[int, int]]:
    """Yield the process ID and the inode of each blocked request for a lock."""
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            # As in "1: -> FLOCK  ADVISORY  WRITE 4711 08:01:123 0 EOF".
            words = line.split()
            if words[1:2] == ["->"]:
                yield int(words[5]), int(words[6].rpartition(":")[2])


def _open_file(pid: int, inode: int) -> str:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if descriptor.stat().st_ino == inode:
                return str(descriptor.readlink())
    return ""

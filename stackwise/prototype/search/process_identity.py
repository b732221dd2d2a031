"""ProcessIdentity: identity of the process that runs a trial, and a check that it is alive."""

from __future__ import annotations

import os
import platform
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["ProcessIdentity"]

_HERE: set[str] = set()  # searches that are running in this process


@dataclass(frozen=True)
class ProcessIdentity:
    """Search in a process on a machine.

    Attributes:
        machine: name, boot and namespace of process numbers. Within these, process numbers are unique.
        process: process number.
        began: start of the process in ticks since the boot. Empty if the system does not report it.
        search: identifier of the search within the process.
    """

    machine: str
    process: int
    began: str
    search: str

    @classmethod
    def of_new_search(cls) -> Self:
        """Return a new identity in this process, valid until `end`."""
        search = uuid.uuid4().hex[:12]
        _HERE.add(search)
        return cls(_machine(), os.getpid(), _began(os.getpid()) or "", search)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the identity that `str` encoded."""
        machine, process, began, search = text.rsplit("|", 3)
        return cls(machine, int(process), began, search)

    def end(self) -> None:
        """Mark the search as finished."""
        _HERE.discard(self.search)

    def lives(self) -> bool | None:
        """Return True if the search is running, False if it is not, None if this is unknown.

        It is unknown on another machine, and on a system that reports neither the boot nor the start of a
        process, because a process number may belong to another process, or to another machine of the same
        name. Only the heartbeat is then available.
        """
        if self.machine != _machine():
            return None
        if self.process == os.getpid() and self.search in _HERE:
            return True
        if _kernel() is None or not self.began:
            return None
        try:
            os.kill(self.process, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
        began = _began(self.process)
        if began is None:
            return None
        return began == self.began and began != _ENDED and self.process != os.getpid()

    def __str__(self) -> str:
        return f"{self.machine}|{self.process}|{self.began}|{self.search}"


_ENDED = "ended"


def _machine() -> str:
    parts = [platform.node().replace("|", "_"), _kernel()]
    return "/".join(part for part in parts if part is not None)


def _kernel() -> str | None:
    """Return identifiers of the boot and of the process namespace. None: not reported."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return None


def _began(process: int) -> str | None:
    """Return the start of a process, or `_ENDED` for a zombie. None: not reported."""
    try:
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    # Fields 3 and 22. Field 2, a name, may contain any characters.
    return _ENDED if fields[0] in (b"Z", b"X") else fields[19].decode()

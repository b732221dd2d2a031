"""ProcessIdentity: which process runs a trial, and whether it still is there, as far as this one can tell."""

from __future__ import annotations

import os
import platform
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["ProcessIdentity"]

_HERE: set[str] = set()  # searches that go on in this process


@dataclass(frozen=True)
class ProcessIdentity:
    """A search in a process on a machine.

    Attributes:
        machine: its name, its boot and its process numbers' namespace: numbers mean the same within.
        process: its number.
        began: when it did, in ticks since the boot; empty where the system does not say.
        search: which search of that process.
    """

    machine: str
    process: int
    began: str
    search: str

    @classmethod
    def of_new_search(cls) -> Self:
        """One in this process, until `end`."""
        search = uuid.uuid4().hex[:12]
        _HERE.add(search)
        return cls(_machine(), os.getpid(), _began(os.getpid()) or "", search)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """What `str` gave."""
        machine, process, began, search = text.rsplit("|", 3)
        return cls(machine, int(process), began, search)

    def end(self) -> None:
        """That search is over."""
        _HERE.discard(self.search)

    def lives(self) -> bool | None:
        """Whether it goes on; None: that cannot be told from here, and only its sign of life can.

        So it is on another machine, and where a system says neither which boot this is nor when a process
        began: a number alone may be that of another process, or of another machine of the same name.
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
    """Which boot of which machine this is, and which numbers of processes; None: the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # it is no Linux
        return None


def _began(process: int) -> str | None:
    """When a process began; `_ENDED` of one that nobody has waited for yet; None: the system does not say."""
    try:
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    # The 3rd and the 22nd field; the 2nd, a name, may hold anything.
    return _ENDED if fields[0] in (b"Z", b"X") else fields[19].decode()

"""Peak memory of a call, measured in a pass of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from stackwise.benchmark.plain_call import is_plain_call, kind_of, refuse_unstarted
from stackwise.support.device import release_freed_memory

__all__ = [
    "PeakMemory",
    "PeakWatch",
    "high_water_mark",
    "peak_memory",
    "peak_memory_bytes",
    "process_status",
    "watch_peak",
]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclass(frozen=True)
class PeakMemory:
    """The most memory that was in use at any moment of a call, in bytes. None is what cannot be read.

    Attributes:
        allocated: on the CUDA device, held by tensors, the model's included; None on the CPU.
        reserved: on the CUDA device, taken by torch's allocator, whether tensors held it or not. With
            cudaMallocAsync an upper bound.
        device_delta: how much less of the CUDA device was free after the call than before, whoever took it:
            reserved memory, but also contexts, NCCL's buffers and the workspaces of libraries, and other
            processes.
        resident: of the whole process, in the memory of the host.
        before: of what `in_use` counts, when the call began.
        resident_before: of the whole process, in the memory of the host, when the call began.
        mapped: how much more of files, of libraries above all, was in the memory of the host after the call
            than before: the first call of a library brings it in.
    """

    allocated: int | None = None
    reserved: int | None = None
    device_delta: int | None = None
    resident: int | None = None
    before: int | None = None
    resident_before: int | None = None
    mapped: int | None = None

    @property
    def in_use(self) -> int | None:
        """The number that a limit is for: `allocated` on CUDA, else `resident`."""
        return self.resident if self.allocated is None else self.allocated

    @property
    def added(self) -> int | None:
        """How far `in_use` rose above what was in use before."""
        return None if self.in_use is None or self.before is None else self.in_use - self.before

    @property
    def host_added(self) -> int | None:
        """How far the memory of the host rose above what was resident before, files apart."""
        if self.resident is None or self.resident_before is None:
            return None
        return max(0, self.resident - self.resident_before - max(0, self.mapped or 0))

    def to_dict(self) -> dict[str, int | None]:
        """Plain values, for JSON."""
        derived = {"in_use": self.in_use, "added": self.added, "host_added": self.host_added}
        return asdict(self) | derived


class PeakWatch:
    """What `watch_peak` gives: `peak`, once its block has ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._allocated = self._reserved = self._free = self._before = 0
        self._resident: int | None = None
        self._resident_before: int | None = None
        self._mapped: int | None = None
        self._peak: PeakMemory | None = None
        self._sees_host = False

    @property
    def peak(self) -> PeakMemory:
        """The most that was in use inside the block.

        Raises:
            RuntimeError: the block has not ended.
        """
        if self._peak is None:
            raise RuntimeError("peak: the block of watch_peak has not ended")
        return self._peak

    def _begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            self._free, _ = torch.cuda.mem_get_info(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        release_freed_memory()
        self._sees_host = _reset_high_water_mark()
        self._resident_before, self._mapped = process_status("VmRSS"), process_status("RssFile")

    def _look(self) -> None:
        """Keep the peaks so far, which another watch is about to reset."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._allocated = max(self._allocated, torch.cuda.max_memory_allocated(self._device))
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device))
        mark = high_water_mark() if self._sees_host else None
        if mark is not None:
            self._resident = max(self._resident or 0, mark)

    def _end(self) -> None:
        self._look()
        # Of a peak that cannot be seen nobody needs to know from where it rose.
        before = None if self._resident is None else self._resident_before
        mapped, now = None, process_status("RssFile")
        if before is not None and now is not None and self._mapped is not None:
            mapped = now - self._mapped
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            self._peak = PeakMemory(
                self._allocated,
                self._reserved,
                self._free - free,
                self._resident,
                self._before,
                before,
                mapped,
            )
        else:
            self._peak = PeakMemory(
                resident=self._resident, before=before, resident_before=before, mapped=mapped
            )


_WATCHES: list[PeakWatch] = []


@contextmanager
def watch_peak(device: torch.device | str = "cpu", *, collect: bool = True) -> Iterator[PeakWatch]:
    """Inside, the most memory in use is watched.

    Garbage is collected first, and freed memory that torch or the C library still keeps is given back, so
    that what earlier work left does not hide or raise the peak. Watches may lie within each other: what an
    inner one resets, the outer ones have seen. A call of `torch.cuda.reset_peak_memory_stats` inside has
    them forget what was before it.

    Args:
        device: whose memory `in_use` is about.
        collect: False: garbage stays, where the caller has just had it collected.
    """
    device = torch.device(device)
    if collect:
        gc.collect()
    for outer in _WATCHES:
        outer._look()
    watch = PeakWatch(device)
    watch._begin()
    _WATCHES.append(watch)
    try:
        yield watch
    finally:
        _WATCHES.remove(watch)
        watch._end()


def peak_memory(call: Callable[[], object], device: torch.device | str = "cpu") -> PeakMemory:
    """The most memory in use at any moment of one call; its time should be taken in another.

    What an earlier call kept or cached makes a difference: call it once before for the peak of a steady
    state, and not for that of a first call. On the CPU the process counts as a whole, with all that else is
    in it; `stackwise.benchmark.memory.fresh_peak_memory` gives a call a process of its own.

    Raises:
        TypeError: `call` is a model, a class of models, or cannot be called; or it returns a generator or a
            coroutine, which has not run.
    """
    if not is_plain_call(call):
        raise TypeError(f"call: got {kind_of(call)}; wanted a function that makes one call")
    with watch_peak(device) as watch:
        refuse_unstarted(call())
    return watch.peak


def peak_memory_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """`in_use` of `peak_memory`: the most memory in use at any moment of one call.

    On CUDA: bytes held by tensors, the model's included. On the CPU under Linux: resident bytes of
    the whole process, its high-water mark reset before the call (proc(5), clear_refs). Elsewhere,
    and where the kernel refuses the reset, None, and no call is made: no other reading is put in its place.
    """
    if device.type != "cuda" and not _reset_high_water_mark():
        return None
    with watch_peak(device) as watch:
        call()
    return watch.peak.in_use


def high_water_mark() -> int | None:
    """The most bytes that were resident in this process (VmHWM of proc(5)); None where nobody says."""
    return process_status("VmHWM")


def process_status(key: str) -> int | None:
    """Bytes that proc(5) tells of this process under `key`, such as VmRSS; None where it does not."""
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def _reset_high_water_mark() -> bool:
    """Whether the kernel did: an outer watch's peak is forgotten unless it looked before."""
    for outer in _WATCHES:
        outer._look()
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True

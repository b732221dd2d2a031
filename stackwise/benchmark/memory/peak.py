"""Peak memory of a call, measured in a separate pass."""

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
    """Maximum memory in use during a call, in bytes. Values that cannot be read are None.

    Attributes:
        allocated: bytes of tensors on the CUDA device, including the model. None on the CPU.
        reserved: bytes that torch's allocator has from the CUDA device, with or without a tensor in them.
            With cudaMallocAsync, an upper bound.
        device_delta: decrease of the free memory of the CUDA device during the call, from any cause: reserved
            memory, contexts, NCCL's buffers, workspaces of libraries, and other processes.
        resident: resident memory of the process on the host.
        before: value of `in_use` at the start of the call.
        resident_before: resident memory of the process on the host at the start of the call.
        mapped: increase of file-backed resident memory during the call, mostly libraries, which their first
            call loads.
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
        """Memory that a limit applies to: `allocated` on CUDA, `resident` otherwise."""
        return self.resident if self.allocated is None else self.allocated

    @property
    def added(self) -> int | None:
        """Increase of `in_use` above its value at the start of the call."""
        return None if self.in_use is None or self.before is None else self.in_use - self.before

    @property
    def host_added(self) -> int | None:
        """Increase of the resident memory of the host during the call, without file-backed memory."""
        if self.resident is None or self.resident_before is None:
            return None
        return max(0, self.resident - self.resident_before - max(0, self.mapped or 0))

    def to_dict(self) -> dict[str, int | None]:
        """Return plain values for JSON."""
        derived = {"in_use": self.in_use, "added": self.added, "host_added": self.host_added}
        return asdict(self) | derived


class PeakWatch:
    """Result of `watch_peak`: `peak` is available after its block."""

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
        """Maximum memory in use within the block.

        Raises:
            RuntimeError: the block is still running.
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
        """Store the peaks before another watch resets them."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._allocated = max(self._allocated, torch.cuda.max_memory_allocated(self._device))
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self._device))
        mark = high_water_mark() if self._sees_host else None
        if mark is not None:
            self._resident = max(self._resident or 0, mark)

    def _end(self) -> None:
        self._look()
        # If the peak is unknown, the memory before it has no use.
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
    """Context in which the peak memory is measured.

    Garbage is collected first, and free memory of torch and the C library is returned to the system, so that
    earlier work neither hides nor raises the peak. Contexts may be nested: before an inner one resets the
    peak, the outer ones store it. If `torch.cuda.reset_peak_memory_stats` is called within the context,
    earlier peaks are lost.

    Args:
        device: device that `in_use` refers to.
        collect: False: skip the garbage collection, if the caller has just run it.
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
    """Return the maximum memory in use during one call. Time the call separately.

    Caches of an earlier call affect the result. For the peak of a steady state, call it once before; for the
    peak of a first call, do not. On the CPU, the memory of the entire process counts.
    `stackwise.benchmark.memory.fresh_peak_memory` runs a call in a separate process.

    Raises:
        TypeError: `call` is a model, a class of models, or not callable; or it returns a generator or a
            coroutine, which has not run.
    """
    if not is_plain_call(call):
        raise TypeError(f"call: got {kind_of(call)}; wanted a function that makes one call")
    with watch_peak(device) as watch:
        refuse_unstarted(call())
    return watch.peak


def peak_memory_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Return `in_use` of `peak_memory`: the maximum memory in use during one call.

    On CUDA, it is the bytes of tensors, including the model. On the CPU under Linux, it is the resident
    memory of the process, with the high-water mark reset before the call (proc(5), clear_refs). On other
    systems, or if the kernel refuses the reset, the result is None, and the call does not run.
    """
    if device.type != "cuda" and not _reset_high_water_mark():
        return None
    with watch_peak(device) as watch:
        call()
    return watch.peak.in_use


def high_water_mark() -> int | None:
    """Return the maximum resident bytes of this process (VmHWM of proc(5)). None: not reported."""
    return process_status("VmHWM")


def process_status(key: str) -> int | None:
    """Return the bytes of this process under `key` in proc(5), such as VmRSS. None: not reported."""
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def _reset_high_water_mark() -> bool:
    """Reset the kernel's high-water mark. Return True if it succeeded.

    Outer watches store their peak first.
    """
    for outer in _WATCHES:
        outer._look()
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True

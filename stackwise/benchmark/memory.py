"""Peak memory of a call, measured in a pass of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["high_water_mark", "peak_memory_bytes"]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def peak_memory_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """The most memory in use at any moment of one call.

    On CUDA: bytes held by tensors, the model's included. On the CPU under Linux: resident bytes of
    the whole process, its high-water mark reset before the call (proc(5), clear_refs). Elsewhere,
    and where the kernel refuses the reset, None: no other reading is put in its place.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return None
    call()
    return high_water_mark()


def high_water_mark() -> int | None:
    """The most bytes that were resident in this process (VmHWM of proc(5)); None where nobody says."""
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None

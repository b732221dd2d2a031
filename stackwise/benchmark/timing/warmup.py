"""Warm-up: calls before the first sample, until compilation and allocation no longer affect the time."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from stackwise.benchmark.plain_call import checked_call
from stackwise.benchmark.timing.clock import Call, Clock
from stackwise.support.arguments import check_number

__all__ = ["COLD_START", "WarmUp", "warm_up"]

_LEAST_CALLS = 3
_LEAST_SECONDS = 0.01
_MOST_CALLS = 1000


@dataclass(frozen=True)
class WarmUp:
    """Result of a warm-up.

    Attributes:
        calls: number of calls.
        seconds: total time, including compilation.
        steady: True if the warm-up stopped because the time of a call was steady.
        reason: reason why it was not steady. None if it was.
        call_seconds: fastest call of the last window on the clock. 0 without a window.
        period_seconds: time from one call of that window to the next, including the work between them.
    """

    calls: int
    seconds: float
    steady: bool
    reason: str | None
    call_seconds: float = 0.0
    period_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


COLD_START = WarmUp(0, 0.0, False, "not warmed up")


def warm_up(
    call: Call,
    device: torch.device,
    clock: Clock,
    *,
    seconds: float = 2.0,
    within: float = 0.005,
    before: Call | None = None,
) -> WarmUp:
    """Call until the time is steady.

    Calls are grouped into windows of at least three calls and about 10 ms. The time is steady if in two
    consecutive windows nothing was compiled, CUDA's allocator took no memory from the device, and the fastest
    calls agree. The fastest call is used, because other processes can only slow a call down.

    Args:
        call: function to warm up.
        device: device that the call runs on.
        clock: clock that times the call.
        seconds: time after the first window, which also compiles and loads, in which further windows may
            start. The last window is completed. 0: only one window.
        within: relative difference of two windows below which the time is steady.
        before: function that is called before each call, outside of the measured time.

    Raises:
        ValueError: `seconds` or `within` is not a number >= 0, or the call on the CPU leaves work on a GPU.
        TypeError: the call returns a generator or a coroutine, which has not run.
    """
    check_number("warmup_seconds", seconds, "a number >= 0", lambda value: value >= 0)
    check_number("steady_within", within, "a number >= 0", lambda value: value >= 0)
    start = time.perf_counter()
    deadline, calls, size = math.inf, 0, _LEAST_CALLS
    fastest, reason = math.inf, ""
    timed = checked_call(call, device)  # only the first window: later ones must be comparable with samples
    while True:
        compiled, reserved, began = _compilations(), _reserved_bytes(device), time.perf_counter()
        window = min(clock.sample(timed, size, before=before))
        now = time.perf_counter()
        calls, period = calls + size, (now - began) / size
        first, last, fastest = calls == size, fastest, window
        if _compilations() != compiled:
            reason, fastest = "code was still being compiled", math.inf
        elif _reserved_bytes(device) != reserved:
            reason, fastest = "the allocator still took memory from the device", math.inf
        elif abs(window - last) <= within * window:
            return WarmUp(calls, now - start, True, None, window, period)
        elif math.isinf(last):
            reason = "there was time for one undisturbed window only"
        else:
            reason = f"two windows differed by {abs(window - last) / window:.1%}"
        if first:
            deadline = now + seconds
        if now >= deadline:
            return WarmUp(calls, now - start, False, f"{reason} after {calls} calls", window, period)
        timed = call
        size = min(_MOST_CALLS, max(_LEAST_CALLS, math.ceil(_LEAST_SECONDS / max(period, 1e-9))))


def _compilations() -> int:
    """Return the number of frames that torch.compile has inspected so far.

    0 if the compiler is not loaded.
    """
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters["frames"]["total"]) if "frames" in counters else 0


def _reserved_bytes(device: torch.device) -> int:
    """Return the bytes that CUDA's allocator has taken from the device so far, including returned bytes."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("reserved_bytes.all.allocated", 0))

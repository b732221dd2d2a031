"""Warm-up: calls before the first sample, until nothing but the call itself is left to be timed."""

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
    """How a warm-up went.

    Attributes:
        calls: made.
        seconds: taken, compilation included.
        steady: whether it ended because the time of a call had settled.
        reason: why it ended otherwise; None where it was steady.
        call_seconds: of the fastest call of its last window, on the clock; 0 where there was none.
        period_seconds: from one call of that window to the next, with what came between them.
    """

    calls: int
    seconds: float
    steady: bool
    reason: str | None
    call_seconds: float = 0.0
    period_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
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
    """Call until the time has settled.

    In windows of at least three calls and about 10 ms. It has settled when in two windows in a row nothing
    was compiled, CUDA's allocator took no new memory from the device, and their fastest calls agree. The
    fastest, since what else runs on a machine only ever slows a call down.

    Args:
        call: what is warmed up.
        device: where it does its work.
        clock: that times it.
        seconds: after the first window, which also compiles and loads, in which further ones begin. The
            last of them is finished; 0: there is no second.
        within: relative difference of two windows that counts as settled.
        before: called before each call, and not timed.

    Raises:
        ValueError: `seconds` or `within` is no number >= 0, or on the CPU the call leaves work on a GPU.
        TypeError: the call returns a generator or a coroutine, which has not run.
    """
    check_number("warmup_seconds", seconds, "a number >= 0", lambda value: value >= 0)
    check_number("steady_within", within, "a number >= 0", lambda value: value >= 0)
    start = time.perf_counter()
    deadline, calls, size = math.inf, 0, _LEAST_CALLS
    fastest, reason = math.inf, ""
    timed = checked_call(call, device)  # in the first window alone: later ones are held to the samples
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
    """Frames that torch.compile has looked at so far; without the compiler loaded none."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters["frames"]["total"]) if "frames" in counters else 0


def _reserved_bytes(device: torch.device) -> int:
    """What CUDA's allocator has taken from the device so far, no matter what it has given back."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("reserved_bytes.all.allocated", 0))

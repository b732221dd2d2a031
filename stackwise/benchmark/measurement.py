"""Measurement: raw samples of a workload, and how they were taken."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from stackwise.benchmark.clock import time_call
from stackwise.benchmark.memory import peak_memory_bytes
from stackwise.benchmark.workload import Workload

__all__ = ["Measurement", "call_once", "measure"]


@dataclass(frozen=True)
class Measurement:
    """Raw samples.

    Attributes:
        workload: its name.
        seconds: one per call, in order, after warm-up.
        tokens: handled by one call.
        warmup_calls: calls before the first sample.
        steady: whether the warm-up ended because the time had settled, not because its own had run out.
        peak_memory_bytes: of one call in a pass of its own; None where it cannot be read.
        execution: how the work was done, as far as the workload says: which attention kernel ran, say.
    """

    workload: str
    seconds: tuple[float, ...]
    tokens: int
    warmup_calls: int
    steady: bool
    peak_memory_bytes: int | None
    execution: dict[str, str] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Median seconds of a call."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a call over its median time."""
        return self.tokens / self.median

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "workload": self.workload,
            "median_seconds": self.median,
            "min_seconds": min(self.seconds),
            "max_seconds": max(self.seconds),
            "calls": len(self.seconds),
            "tokens_per_second": self.tokens_per_second,
            "peak_memory_bytes": self.peak_memory_bytes,
            "warmup_calls": self.warmup_calls,
            "steady": self.steady,
            "execution": self.execution,
        }


def measure(
    workload: Workload,
    *,
    min_seconds: float = 1.0,
    min_calls: int = 5,
    warmup_seconds: float = 10.0,
    steady_within: float = 0.05,
) -> Measurement:
    """Time a workload call by call, after warming it up until its time has settled.

    Warm-up runs windows of three calls until the fastest calls of two windows in a row agree within
    `steady_within`, for at most `warmup_seconds`; whether they did is part of the result. Garbage is
    collected before, not during.

    Args:
        workload: what to call.
        min_seconds: samples are taken for at least this long,
        min_calls: and at least this often.
        warmup_seconds: the most time that the warm-up takes.
        steady_within: relative difference of two windows that counts as settled.
    """
    deadline = time.perf_counter() + warmup_seconds
    warmup_calls, steady, last = 0, False, float("inf")
    while not steady and (warmup_calls == 0 or time.perf_counter() < deadline):
        window = min(time_call(workload.call, workload.device) for _ in range(3))
        warmup_calls += 3
        steady = abs(window - last) <= steady_within * window
        last = window

    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        samples: list[float] = []
        total = 0.0
        while len(samples) < min_calls or total < min_seconds:
            samples.append(time_call(workload.call, workload.device))
            total += samples[-1]
    finally:
        if was_enabled:
            gc.enable()
    peak = peak_memory_bytes(workload.call, workload.device)
    return Measurement(
        workload.name, tuple(samples), workload.tokens, warmup_calls, steady, peak, workload.execution()
    )


def call_once(workload: Workload) -> Measurement:
    """One timed call without warm-up: that it runs is shown, how fast it is, is not."""
    seconds = time_call(workload.call, workload.device)
    return Measurement(workload.name, (seconds,), workload.tokens, 0, False, None, workload.execution())

"""Latency of generation: time to the first token and time of every later token.

TTFT is the time from the prompt to the first token. ITL (inter-token latency) is each gap between two tokens.
TPOT (time per output token) is the mean gap of one generation: (E2E - TTFT) / (n - 1).
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from stackwise.benchmark.memory.peak import peak_memory_bytes
from stackwise.benchmark.timing.clock import CLOCKS, HostClock, timing_event
from stackwise.benchmark.timing.conditions import Conditions, notes_of
from stackwise.benchmark.timing.gpu_state import READING_INTERVAL, GpuSensor
from stackwise.benchmark.timing.histogram import histogram
from stackwise.benchmark.timing.host_state import host_state
from stackwise.benchmark.timing.measurement import LEAST_CALLS, collect_new, uncollected
from stackwise.benchmark.timing.percentile import Percentile, percentile
from stackwise.benchmark.timing.warmup import warm_up
from stackwise.benchmark.workload import Workload, check_workload
from stackwise.support.arguments import check_choice, check_number, check_sizes, require

__all__ = ["LATENCIES", "GenerationMeasurement", "generate_once", "measure_generation"]

LATENCIES = ("ttft", "itl", "tpot", "e2e")
_QUANTILES = (50, 95, 99)


@dataclass(frozen=True)
class GenerationMeasurement(Conditions):
    """Arrival times of all tokens of all generations, with the conditions of the measurement.

    On the clock "host", a token arrives when the device has computed it and the host has waited for the
    device. On the clock "device", a token arrives when the device has computed it, while the host runs ahead.

    Attributes:
        workload: name of the workload.
        token_seconds: for each generation, the seconds from its start to each of its tokens.
        batch_size: number of rows. All rows receive their tokens at the same time.
        prompt_tokens: number of prompt tokens per row.
    """

    workload: str
    token_seconds: tuple[tuple[float, ...], ...] = field(repr=False)
    batch_size: int
    prompt_tokens: int

    def __str__(self) -> str:
        n = len(self.token_seconds)
        gap = f", TPOT {statistics.median(self.tpot) * 1e3:.3f} ms" if self.tpot else ""
        return (
            f"{self.workload}: TTFT {statistics.median(self.ttft) * 1e3:.3f} ms{gap}, "
            f"{self.tokens_per_second:,.0f} tokens/s, {n} generation{'' if n == 1 else 's'}"
        )

    @property
    def new_tokens(self) -> int:
        """Number of new tokens per row."""
        return len(self.token_seconds[0])

    @property
    def tokens(self) -> int:
        """Number of new tokens of one generation, over all rows."""
        return self.batch_size * self.new_tokens

    @property
    def e2e(self) -> tuple[float, ...]:
        """Total seconds of each generation."""
        return tuple(times[-1] for times in self.token_seconds)

    seconds = e2e

    @property
    def ttft(self) -> tuple[float, ...]:
        """Seconds to the first token of each generation."""
        return tuple(times[0] for times in self.token_seconds)

    @cached_property
    def itl(self) -> tuple[float, ...]:
        """Gaps in seconds between consecutive tokens, of all generations.

        Empty if a generation has one token.
        """
        return tuple(b - a for times in self.token_seconds for a, b in pairwise(times))

    @property
    def tpot(self) -> tuple[float, ...]:
        """Mean gap in seconds between the tokens of each generation. Empty if a generation has one token."""
        n = self.new_tokens
        return tuple((times[-1] - times[0]) / (n - 1) for times in self.token_seconds) if n > 1 else ()

    @property
    def median(self) -> float:
        """Median seconds of a generation."""
        return statistics.median(self.e2e)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of a generation divided by its median time. The time includes the prompt."""
        return self.tokens / self.median

    @property
    def prefill_tokens_per_second(self) -> float:
        """Tokens of all prompts divided by the median TTFT, which includes the first new token."""
        return self.batch_size * self.prompt_tokens / statistics.median(self.ttft)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Rows divided by the median TPOT. None if a generation has one token."""
        return self.batch_size / statistics.median(self.tpot) if self.tpot else None

    def percentile(self, q: float, of: str = "itl", *, confidence: float = 0.95) -> Percentile | None:
        """Return percentile `q` of "ttft", "itl" (all gaps pooled), "tpot" or "e2e".

        The gaps of one generation are not independent. If its tokens slow down together, the interval of
        "itl" is too narrow.

        Args:
            q: percentile in percent.
            of: latency.
            confidence: confidence level of the interval.

        Returns:
            None for "itl" and "tpot" if a generation has one token.

        Raises:
            ValueError: unknown latency, or invalid arguments of `stackwise.benchmark.timing.percentile`.
        """
        check_choice("of", of, LATENCIES)
        samples: tuple[float, ...] = getattr(self, of)
        return percentile(samples, q, confidence=confidence) if samples else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON.

        They contain the keys of a `Measurement` of complete generations, and token latencies.
        """
        return {
            "workload": self.workload,
            "median_seconds": self.median,
            "min_seconds": min(self.e2e),
            "max_seconds": max(self.e2e),
            "calls": len(self.e2e),
            "samples": len(self.e2e),
            "calls_per_sample": 1,
            "percentiles": self._percentiles("e2e"),
            "histograms": {of: histogram(getattr(self, of)) for of in ("e2e", "ttft", "itl")},
            "tokens_per_second": self.tokens_per_second,
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "latencies": {of: self._percentiles(of) for of in ("ttft", "itl", "tpot")},
            "batch_size": self.batch_size,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "cache": "warm",
            **self.conditions(),
        }

    def _percentiles(self, of: str) -> dict[str, Any]:
        found = {f"p{q}": self.percentile(q, of) for q in _QUANTILES}
        return {name: each.to_dict() for name, each in found.items() if each is not None}


def measure_generation(
    workload: Workload,
    *,
    min_seconds: float = 1.0,
    min_calls: int = LEAST_CALLS,
    warmup_seconds: float = 2.0,
    steady_within: float = 0.005,
    clock: str = "host",
) -> GenerationMeasurement:
    """Measure the time of every token of a generation, after a warm-up.

    Each generation starts from the prompt.

    On the host clock, the host waits for the device after each token, like a program that shows each token to
    a user. The device therefore cannot run ahead. `measure` times complete generations of the same workload
    without these waits. Between generations, at most every 0.2 s, garbage is collected, and the clocks and
    temperature of a GPU are read.

    Args:
        workload: result of `model_workload(spec, "generate", ...)`.
        min_seconds: minimum total time of the generations.
        min_calls: minimum number of generations.
        warmup_seconds: time after the first window of the warm-up in which further windows may start.
        steady_within: relative difference of two windows of generations below which the warm-up is steady.
        clock: "host", or "device" (CUDA only).

    Raises:
        ValueError: another workload or clock, or numbers out of range.
        TypeError: not a workload.
        RuntimeError: the model's own loop returned fewer or more tokens than requested.
    """
    _check_generates(workload)
    check_choice("clock", clock, CLOCKS)
    require(clock == "host" or workload.device.type == "cuda", "clock", clock, f"'host' on {workload.device}")
    check_number("min_seconds", min_seconds, "a number >= 0", lambda value: value >= 0)
    check_sizes(0, min_calls=min_calls)
    host, sensor = host_state(), GpuSensor(workload.device)
    warmup = warm_up(
        workload.call,
        workload.device,
        HostClock(workload.device),
        seconds=warmup_seconds,
        within=steady_within,
    )
    generations: list[tuple[float, ...]] = []
    total = unread = 0.0
    with uncollected():
        states = [sensor.read()]
        while len(generations) < max(1, min_calls) or total < min_seconds:
            times = _device_times(workload) if clock == "device" else _host_times(workload)
            generations.append(times)
            total, unread = total + times[-1], unread + times[-1]
            if unread >= READING_INTERVAL:
                collect_new()
                states.append(sensor.read())
                unread = 0.0
        if unread:
            collect_new()
            states.append(sensor.read())
    return GenerationMeasurement(
        workload=workload.name,
        token_seconds=tuple(generations),
        batch_size=workload.batch_size,
        prompt_tokens=workload.seq_len,
        warmup=warmup,
        peak_memory_bytes=peak_memory_bytes(workload.call, workload.device),
        execution=workload.execution(),
        clock=clock,
        host=host,
        gpu=tuple(state for state in states if state is not None),
        notes=notes_of(host, sensor, workload.notes()),
    )


def generate_once(workload: Workload) -> GenerationMeasurement:
    """Time one generation without warm-up. It shows that the workload runs, not its speed."""
    _check_generates(workload)
    times = (_host_times(workload),)
    return GenerationMeasurement(
        workload.name,
        times,
        workload.batch_size,
        workload.seq_len,
        execution=workload.execution(),
        notes=workload.notes(),
    )


def _check_generates(workload: Workload) -> None:
    check_workload(workload)
    wanted = "what model_workload(spec, 'generate', ...) makes"
    require(workload.each_token is not None, "workload", workload.name, wanted)


def _host_times(workload: Workload) -> tuple[float, ...]:
    """Return the seconds from an idle device to each token. The device is idle after each token."""
    now, device, waits = time.perf_counter_ns, workload.device, workload.device.type == "cuda"
    ticks: list[int] = []

    def on_token(token_B: Tensor) -> None:  # noqa: ARG001  # only the time of the call matters
        if waits:
            torch.cuda.synchronize(device)
        ticks.append(now())

    assert workload.each_token is not None
    if waits:
        torch.cuda.synchronize(device)
    start = now()
    workload.each_token(on_token)
    return tuple((tick - start) * 1e-9 for tick in ticks)


def _device_times(workload: Workload) -> tuple[float, ...]:
    """Return the seconds on the device's stream from the start to each token, read after the last token."""
    device = workload.device
    with torch.cuda.device(device):
        start, *events = (timing_event() for _ in range(workload.new_tokens + 1))
        # An event is created when it is first recorded, so record all of them before the measurement.
        for event in (start, *events):
            event.record()
        torch.cuda.synchronize(device)
        waiting = iter(events)

        def on_token(token_B: Tensor) -> None:  # noqa: ARG001
            next(waiting).record()

        assert workload.each_token is not None
        start.record()
        workload.each_token(on_token)
        torch.cuda.synchronize(device)
        return tuple(start.elapsed_time(event) * 1e-3 for event in events)

"""Measurement: raw samples of a workload, and the conditions under which they were taken."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from stackwise.benchmark.memory.peak import peak_memory_bytes
from stackwise.benchmark.plain_call import checked_call
from stackwise.benchmark.timing.cache_state import CACHE_STATES, CacheFlush, RotatingCall
from stackwise.benchmark.timing.clock import SHORTEST_SAMPLE, Call, Clock, create_clock, time_call
from stackwise.benchmark.timing.conditions import Conditions, notes_of
from stackwise.benchmark.timing.gpu_state import READING_INTERVAL, GpuSensor, GpuState
from stackwise.benchmark.timing.histogram import histogram
from stackwise.benchmark.timing.host_state import HostState, host_state
from stackwise.benchmark.timing.percentile import Percentile, percentile
from stackwise.benchmark.timing.warmup import WarmUp, warm_up
from stackwise.benchmark.workload import Workload, check_workload
from stackwise.support.arguments import check_choice, check_number, check_sizes

__all__ = ["LEAST_CALLS", "Measurement", "Sampler", "call_once", "collect_new", "measure", "uncollected"]

LEAST_CALLS = 5  # default
_MOST_SAMPLES = 10_000  # per call of a clock
# Per requested second. Samples of 50 us, the minimum of grouped calls, reach half of it. More samples of
# shorter calls add no information, and all samples are stored.
_MOST_PER_SECOND = 40_000


@dataclass(frozen=True)
class Measurement(Conditions):
    """Duration of each call of a workload, and the conditions of the measurement.

    Attributes:
        workload: name of the workload.
        seconds: seconds per call of each sample, in order, after the warm-up.
        tokens: number of tokens per call. 0: not applicable.
        cache: state of the last-level cache before each sample: with the data of the previous call ("warm")
            or flushed ("cold").
        calls_per_sample: number of calls per sample. Calls shorter than 50 us are timed in groups, and a
            sample is their mean.
    """

    workload: str
    seconds: tuple[float, ...] = field(repr=False)
    tokens: int
    cache: str = field(default="warm", kw_only=True)
    calls_per_sample: int = field(default=1, kw_only=True)

    def __str__(self) -> str:
        middle, rate, n = self.p50, self.tokens_per_second, len(self.seconds)
        parts = [f"{self.workload}: {self.median * 1e3:.3f} ms"]
        if middle.low is not None and middle.high is not None:
            parts[0] += f" ({middle.low * 1e3:.3f} to {middle.high * 1e3:.3f})"
        if rate is not None:
            parts.append(f"{rate:,.0f} tokens/s")
        return ", ".join([*parts, f"{n} sample{'' if n == 1 else 's'}"])

    @property
    def median(self) -> float:
        """Median seconds of a call."""
        return statistics.median(self.seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of a call divided by its median time. None if the work has no tokens."""
        return self.tokens / self.median if self.tokens else None

    def percentile(self, q: float, *, confidence: float = 0.95) -> Percentile:
        """Return percentile `q`, in percent, of the seconds of a call.

        Its value is None if there are too few samples, or if a sample is the mean of several calls, which
        hides slow calls. The median is always reported.

        Raises:
            ValueError: invalid arguments of `stackwise.benchmark.timing.percentile`.
        """
        found = percentile(self.seconds, q, confidence=confidence)
        if self.calls_per_sample > 1 and q != 50:
            return replace(found, value=None, low=None, high=None)
        return found

    @property
    def p50(self) -> Percentile:
        """Median with its confidence interval."""
        return self.percentile(50)

    @property
    def p95(self) -> Percentile:
        """95th percentile of the seconds of a call. Its value is None below 200 samples."""
        return self.percentile(95)

    @property
    def p99(self) -> Percentile:
        """99th percentile of the seconds of a call. Its value is None below 1000 samples."""
        return self.percentile(99)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without the samples, but with their histogram."""
        return {
            "workload": self.workload,
            "median_seconds": self.median,
            "min_seconds": min(self.seconds),
            "max_seconds": max(self.seconds),
            "calls": len(self.seconds) * self.calls_per_sample,
            "samples": len(self.seconds),
            "calls_per_sample": self.calls_per_sample,
            "percentiles": {f"p{each.q}": each.to_dict() for each in (self.p50, self.p95, self.p99)},
            "histograms": {"call": histogram(self.seconds)},
            "tokens_per_second": self.tokens_per_second,
            "cache": self.cache,
            **self.conditions(),
        }


class Sampler:
    """Warmed-up workload from which samples are taken on a clock.

    Args:
        workload: workload to call.
        clock: "host", "device", or a Clock.
        cache: "warm", or "cold": the last-level cache is flushed before each sample.
        warmup_seconds: time after the first window of the warm-up in which further windows may start.
        steady_within: relative difference of two windows below which the warm-up is steady.
        calls_per_sample: number of calls that are timed together. None: as many as needed to reach 50 us.

    Attributes:
        warmup: result of the warm-up.
        calls_per_sample: number of calls that are timed together.
        period_seconds: approximate time from one sample to the next, including the work between samples.

    Raises:
        ValueError: an invalid clock or cache state, or one that the workload's device does not have; numbers
            out of range; or several calls per sample with a cache that is flushed before each sample.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        clock: str | Clock = "host",
        cache: str = "warm",
        warmup_seconds: float = 2.0,
        steady_within: float = 0.005,
        calls_per_sample: int | None = None,
    ) -> None:
        check_choice("cache", cache, CACHE_STATES)
        if calls_per_sample is not None:
            check_sizes(calls_per_sample=calls_per_sample)
        self._workload = workload
        self._clock = create_clock(clock, workload.device)
        rotates = isinstance(workload.call, RotatingCall)
        self._flush = CacheFlush(workload.device) if cache == "cold" and not rotates else None
        if (calls_per_sample or 1) > 1 and self._by_itself:
            raise ValueError(f"calls_per_sample: got {calls_per_sample}; allowed: 1, since {self._by_itself}")
        self.cache = "cold" if rotates else cache
        self._notes: list[str] = []
        self._closed = False
        self.warmup = self._warm_up(warmup_seconds, steady_within)
        self.calls_per_sample = self._calls_per_sample(calls_per_sample)
        self.period_seconds = self.warmup.period_seconds * self.calls_per_sample

    def take(self, count: int) -> list[float]:
        """Return the seconds per call of `count` samples."""
        assert not self._closed, "its cache is no longer flushed"
        return self._clock.sample(
            self._workload.call, count, repeats=self.calls_per_sample, before=self._before
        )

    def peak_memory_bytes(self) -> int | None:
        """Return the peak memory of one more call. No sample can be taken after it. None: unknown."""
        # Free the memory of the cache flush, which would be part of the peak.
        self._flush, self._closed = None, True
        if self._workload.replays is not None:
            return None
        prepare = self._workload.prepare_alone or self._workload.prepare
        if prepare is not None:
            prepare()
        return peak_memory_bytes(self._workload.call, self._workload.device)

    def measurement(
        self,
        seconds: list[float],
        host: HostState,
        gpu: Sequence[GpuState],
        notes: Sequence[str] = (),
        peak_memory_bytes: int | None = None,
    ) -> Measurement:
        """Return a measurement of these samples with all conditions."""
        workload = self._workload
        return Measurement(
            workload=workload.name,
            seconds=tuple(seconds),
            tokens=workload.tokens,
            warmup=self.warmup,
            peak_memory_bytes=peak_memory_bytes,
            execution=workload.execution(),
            clock=self._clock.name,
            cache=self.cache,
            calls_per_sample=self.calls_per_sample,
            host=host,
            gpu=tuple(gpu),
            notes=(*self._notes, *self._clock.notes, *workload.notes(), *notes),
        )

    @property
    def _before(self) -> Call | None:
        """Function to run before each sample, outside of its time.

        The flush is last, so that its effect remains.
        """
        prepare, flush = self._workload.prepare, self._flush
        if prepare is None or flush is None:
            return prepare or flush

        def both() -> None:
            prepare()
            flush()

        return both

    @property
    def _by_itself(self) -> str:
        """Reason why calls cannot be timed in groups. Empty if they can."""
        if self._workload.prepare is not None:
            return "something is put back before each call"
        return "only the first of several would find a cold cache" if self._flush is not None else ""

    def _warm_up(self, seconds: float, within: float) -> WarmUp:
        call, device, clock = self._workload.call, self._workload.device, self._clock
        warmup = warm_up(call, device, clock, seconds=seconds, within=within, before=self._before)
        made = clock.learn(call, self._before)
        if not made:
            return warmup
        # The clock may read different times after `learn`.
        start = time.perf_counter()
        fastest = min(clock.sample(call, 3, before=self._before))
        period = (time.perf_counter() - start) / 3
        return replace(warmup, calls=warmup.calls + made + 3, call_seconds=fastest, period_seconds=period)

    def _calls_per_sample(self, asked: int | None) -> int:
        seconds = self.warmup.call_seconds
        if seconds >= SHORTEST_SAMPLE or (asked or 1) > 1:
            return asked or 1
        reason = self._by_itself or ("calls_per_sample is 1" if asked else "")
        if reason:
            self._notes.append(
                f"a call of {seconds * 1e6:.1f} us was timed alone, since {reason}: to about 0.5 us "
                "on the device clock, 0.1 us on the host's"
            )
            return 1
        return math.ceil(SHORTEST_SAMPLE / max(seconds, 1e-9))


def measure(
    workload: Workload,
    *,
    min_seconds: float = 1.0,
    min_calls: int = LEAST_CALLS,
    warmup_seconds: float = 2.0,
    steady_within: float = 0.005,
    clock: str | Clock = "host",
    cache: str = "warm",
    calls_per_sample: int | None = None,
) -> Measurement:
    """Warm up until the time is steady, then time each call of a workload.

    The warm-up is steady if two consecutive windows of calls agree: nothing was compiled, no memory was taken
    from the device, and the fastest calls differ by at most `steady_within`. Otherwise the warm-up ends with
    the window in which `warmup_seconds` have passed. The result reports the outcome. Between slices of 0.2 s,
    never within one, garbage is collected, and the clocks and temperature of a GPU are read. The peak memory
    is read in a separate call at the end.

    Args:
        workload: workload to call.
        min_seconds: minimum time of sampling, including `prepare` and cache flushes between samples. Sampling
            stops earlier, with a note, at 40,000 samples per second of `min_seconds`.
        min_calls: minimum number of samples.
        warmup_seconds: time after the first window of the warm-up, which also compiles, in which further
            windows may start. The last window, of at least three calls, is completed. 0: only one window.
        steady_within: relative difference of two windows below which the warm-up is steady.
        clock: "host", "device" (CUDA only), or a Clock.
        cache: "warm", or "cold": the last-level cache is flushed before each sample.
        calls_per_sample: number of calls that are timed together, so that a sample is their mean. None: as
            many as needed to reach 50 us.

    Raises:
        ValueError: an invalid clock or cache state, or one that the workload's device does not have; numbers
            out of range; or a workload on the CPU that leaves work on a GPU.
        TypeError: not a workload, or a call that returns a generator or a coroutine, which has not run.
    """
    check_workload(workload)
    check_number("min_seconds", min_seconds, "a number >= 0", lambda value: value >= 0)
    check_sizes(0, min_calls=min_calls)
    host, sensor = host_state(), GpuSensor(workload.device)
    sampler = Sampler(
        workload,
        clock=clock,
        cache=cache,
        warmup_seconds=warmup_seconds,
        steady_within=steady_within,
        calls_per_sample=calls_per_sample,
    )
    least = max(1, min_calls)
    most = max(least, math.ceil(_MOST_PER_SECOND * min_seconds))
    samples: list[float] = []
    with uncollected():
        gpu = [sensor.read()]
        start, passed = time.perf_counter(), 0.0
        while len(samples) < least or (passed < min_seconds and len(samples) < most):
            # The period of the first slice is a guess, so the first slice is as short as possible.
            period = passed / len(samples) if samples else sampler.period_seconds
            rest = min(_ratio(min_seconds - passed, period), most - len(samples)) if samples else 0
            wanted = max(least - len(samples), rest)
            samples += sampler.take(max(1, min(wanted, _ratio(READING_INTERVAL, period), _MOST_SAMPLES)))
            collect_new()
            gpu.append(sensor.read())
            passed = time.perf_counter() - start
    peak = sampler.peak_memory_bytes()
    states = [state for state in gpu if state is not None]
    notes = notes_of(host, sensor)
    if passed < min_seconds:
        told = f"{len(samples):,} samples took {passed:.3f} s of the {min_seconds:g} s asked for"
        notes = (*notes, f"{told}: no more are taken than min_calls, or {_MOST_PER_SECOND:,} for each second")
    return sampler.measurement(samples, host, states, notes, peak)


def call_once(workload: Workload) -> Measurement:
    """Time one call without warm-up. It shows that the workload runs, not its speed.

    Raises:
        ValueError: a workload on the CPU that leaves work on a GPU.
        TypeError: not a workload, or a call that returns a generator or a coroutine, which has not run.
    """
    check_workload(workload)
    if workload.prepare is not None:
        workload.prepare()
    seconds = time_call(checked_call(workload.call, workload.device), workload.device)
    return Measurement(
        workload.name,
        (seconds,),
        workload.tokens,
        execution=workload.execution(),
        notes=workload.notes(),
    )


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect garbage at the start. Within the context, collect it only when `collect_new` is called."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_new() -> None:
    """Collect the garbage of the calls since the last collection. Older objects are not inspected."""
    gc.collect(1)


def _ratio(seconds: float, each: float) -> int:
    """Return the number of samples that take this time, rounded up."""
    return math.ceil(seconds / max(each, 1e-9))

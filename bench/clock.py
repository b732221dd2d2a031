"""`python -m bench.clock`: how exact the clocks are, and what they cost.

- host clock: beside a call that spins until another clock (CLOCK_MONOTONIC_RAW, which nothing adjusts) has
  advanced by 0.5 to 50 ms, and notes by how much it did.
- harness: time of a loop over calls that do nothing beyond that of a bare one; what an empty call is read as;
  and of a training step, how much of the wall time is in no sample.
- percentiles: how often the interval of the median, of p95 and of p99 has the true one in it, of samples of a
  known distribution.
- device clock: beside what CUPTI says through torch.profiler, which reads the GPU's own clock as a kernel
  begins and ends, and no events. Each of a kernel of one length, by turns. "NOT MEASURED" without a GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.claim import Bar, Claim
from stackwise import ModelSpec, create_simple_rack
from stackwise.benchmark import Workload, model_workload
from stackwise.benchmark.timing.clock import SHORTEST_SAMPLE, DeviceClock, HostClock
from stackwise.benchmark.timing.measurement import uncollected
from stackwise.benchmark.timing.percentile import percentile

CPU = torch.device("cpu")
SPINS = (5e-4, 1e-3, 1e-2, 5e-2)  # to enter and to leave one takes about 0.4 us
KERNELS = (20e-6, 50e-6, 100e-6, 1e-3)
TURNS = 5  # of either clock on one kernel: the GPU's clocks move
HOST_ERROR, DEVICE_ERROR = 0.005, 0.01
CALL_COST_US, STEP_COST = 1.0, 0.005
COVERAGE = {50: 100, 95: 400, 99: 2000}  # of each percentile, the samples that it is taken of


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    quick = parser.parse_args().quick
    claim = Claim("clock", quick)
    with uncollected():
        for seconds in SPINS:
            host_accuracy(claim, seconds, count=20 if quick else 200)
        call_cost(claim, count=10_000 if quick else 100_000, rounds=5 if quick else 15)
        step_cost(claim, training_step(CPU), count=20 if quick else 200)
        interval_coverage(claim, trials=200 if quick else 2000)
        device = torch.device("cuda") if torch.cuda.is_available() else None
        for seconds in KERNELS:
            device_accuracy(claim, device, seconds, count=50 if quick else 500)
    return claim.conclude()


class Spin:
    """A call that keeps the host busy until another clock has advanced.

    What follows a loop of that length is out of the processor's caches, and takes microseconds in which
    neither clock is read yet. So the clock under test is read in the loop as well, and nothing but the end of
    the call comes after the last reading.
    """

    def __init__(self, seconds: float) -> None:
        self._nanoseconds = round(seconds * 1e9)
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._keep = self._ends.append

    def __call__(self) -> None:
        read, which, under_test, keep = (
            time.clock_gettime_ns,
            time.CLOCK_MONOTONIC_RAW,
            time.perf_counter_ns,
            self._keep,
        )
        start = read(which)
        self._starts.append(start)
        end = start + self._nanoseconds
        while read(which) < end:
            under_test()
        keep(read(which))

    @property
    def took(self) -> list[float]:
        """How far that clock came in each call, in seconds."""
        return [(end - start) * 1e-9 for start, end in zip(self._starts, self._ends, strict=True)]


def host_accuracy(claim: Claim, seconds: float, count: int) -> None:
    """Median over calls of what the clock read over what the call took."""
    spin = Spin(seconds)
    samples = HostClock(CPU).sample(spin, count)
    errors = [read / took - 1 for read, took in zip(samples, spin.took, strict=True)]
    figures = {"median": median(errors), "largest": max(errors, key=abs), "calls": count}
    name = f"host clock, error at {seconds * 1e3:g} ms"
    claim.enter(Bar(name, abs(median(errors)), HOST_ERROR, at_most=True), figures)


def call_cost(claim: Claim, count: int, rounds: int) -> None:
    """What taking one sample adds to a call, and what of it is in the sample."""
    clock = HostClock(CPU)
    added, read = [], []
    for _ in range(rounds):
        bare = _seconds(lambda: _bare(nothing, count))
        samples: list[float] = []
        timed = _seconds(lambda taken=samples: taken.extend(clock.sample(nothing, count)))
        added.append((timed - bare) / count * 1e6)
        read.append(median(samples) * 1e6)
    figures = {"added_us": added, "read_us": read, "calls": count}
    claim.enter(Bar("harness, us a call", median(added), CALL_COST_US, at_most=True), figures)
    claim.enter(Bar("an empty call is read as, us", median(read), CALL_COST_US, at_most=True))


def step_cost(claim: Claim, step: Workload, count: int) -> None:
    """The part of the wall time of a measurement of training steps that is in no sample."""
    clock = HostClock(step.device)
    clock.sample(step.call, 3)
    samples: list[float] = []
    wall = _seconds(lambda: samples.extend(clock.sample(step.call, count)))
    figures = {"wall_seconds": wall, "sampled_seconds": sum(samples), "step_seconds": median(samples)}
    claim.enter(Bar("harness, share of a step", wall / sum(samples) - 1, STEP_COST, at_most=True), figures)


def interval_coverage(claim: Claim, trials: int) -> None:
    """How many intervals at 95 % have the true percentile of a log-normal distribution in them.

    They have it at least so often but for chance, which over the trials is three standard errors here.
    """
    random = np.random.default_rng(0)
    slack = 3 * (0.95 * 0.05 / trials) ** 0.5
    for q, count in COVERAGE.items():
        normal = random.standard_normal((trials, count))
        # The logarithm of it, which leaves order and coverage as they are, is a standard normal.
        true = _NORMAL_PERCENTILES[q]
        found = [percentile(row, q) for row in normal]
        covered = sum(p.low is not None and p.high is not None and p.low <= true <= p.high for p in found)
        figures = {"samples": count, "trials": trials, "wanted": 0.95}
        claim.enter(Bar(f"interval of p{q}, coverage", covered / trials, round(0.95 - slack, 4)), figures)


# Of the standard normal distribution (any table of it).
_NORMAL_PERCENTILES = {50: 0.0, 95: 1.6448536269514722, 99: 2.3263478740408408}


def device_accuracy(claim: Claim, device: torch.device | None, seconds: float, count: int) -> None:
    """Median over turns of what the events read over what CUPTI says of the same kernel."""
    name = f"device clock, error at {seconds * 1e6:g} us"
    if device is None:
        claim.enter(Bar(name, None, DEVICE_ERROR, at_most=True))
        return
    clock = DeviceClock(device)
    cycles = round(seconds * _cycles_per_second(device))

    def kernel() -> None:
        torch.cuda._sleep(cycles)

    clock.sample(kernel, 10)
    clock.learn(kernel)
    kernel_seconds(kernel, device, 2)  # the first profile of a process loads CUPTI
    repeats = math.ceil(SHORTEST_SAMPLE / seconds)
    each = math.ceil(count / TURNS)
    known, read = [], []
    for _ in range(TURNS):
        known.append(median(kernel_seconds(kernel, device, each)))
        read.append(median(clock.sample(kernel, each, repeats=repeats)))
    errors = [ours / theirs - 1 for ours, theirs in zip(read, known, strict=True)]
    figures: dict[str, Any] = {
        "median": median(errors),
        "largest": max(errors, key=abs),
        "cupti_seconds": known,
        "event_seconds": read,
        "samples": each * TURNS,
        "calls_per_sample": repeats,
        "notes": clock.notes,
    }
    claim.enter(Bar(name, abs(median(errors)), DEVICE_ERROR, at_most=True), figures)


def kernel_seconds(kernel: Callable[[], object], device: torch.device, count: int) -> list[float]:
    """Seconds of each of `count` launches of one kernel, from its beginning to its end as CUPTI tells them.

    Raises:
        RuntimeError: CUPTI did not tell of each: a machine may forbid it.
    """
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            kernel()
        torch.cuda.synchronize(device)
    found = [
        event.time_range.elapsed_us() * 1e-6
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA and "spin" in event.name
    ]
    if len(found) != count:
        raise RuntimeError(f"CUPTI told of {len(found)} kernels where {count} were launched")
    return found


def _cycles_per_second(device: torch.device) -> float:
    """About: from the difference of two long kernels. What a kernel then takes is not taken from it."""
    short, long = 50_000_000, 250_000_000
    clock = DeviceClock(device)
    clock.sample(lambda: torch.cuda._sleep(long), 3)
    times = [median(clock.sample(lambda n=cycles: torch.cuda._sleep(n), 5)) for cycles in (short, long)]
    return (long - short) / (times[1] - times[0])


def training_step(device: torch.device) -> Workload:
    """A small step, of a few milliseconds: the smaller, the more a harness weighs."""

    def rack() -> torch.nn.Module:
        return create_simple_rack(1, 2, d_model=128, d_ff=256, n_heads=2, vocab_size=512)

    return model_workload(ModelSpec.of(rack), "train", batch_size=2, seq_len=64, device=device)


def nothing() -> None:
    """What is timed where the timing itself is in question."""


def _bare(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())

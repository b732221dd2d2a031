"""Interleaved measurement of several workloads, so that a disturbance affects all of them.

The speed of a machine drifts from minute to minute, by more than the differences of interest. Samples of two
workloads within one round share the drift, so it cancels in their ratio.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stackwise.benchmark.timing.conditions import notes_of
from stackwise.benchmark.timing.gpu_state import GpuSensor, GpuState
from stackwise.benchmark.timing.host_state import host_state
from stackwise.benchmark.timing.measurement import Measurement, Sampler, collect_new, uncollected
from stackwise.benchmark.timing.percentile import percentile
from stackwise.benchmark.workload import Workload, check_workload
from stackwise.support.arguments import check_choice, check_number, check_sizes, require

__all__ = ["Interleaved", "Ratio", "interleave"]

# Share of all rounds. If more rounds were throttled, the other rounds were probably affected too.
_MOST_DISCARDED = 0.2


@dataclass(frozen=True)
class Ratio:
    """Ratio of the times of two workloads, over rounds.

    Attributes:
        median: median of the ratios within a round. None if no round is valid.
        low: lower end of the 95 % confidence interval of the median, from order statistics. None for fewer
            than 6 rounds.
        high: upper end of the interval.
        rounds: number of valid rounds.
    """

    median: float | None
    low: float | None
    high: float | None
    rounds: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Interleaved:
    """Results of an interleaved measurement.

    Attributes:
        measurements: measurement of each workload by name, without the samples of discarded rounds. If every
            round was discarded, they contain these samples, with a note.
        rounds: seconds of a call in each valid round by name: the median of the samples in that round.
        n_rounds: number of rounds that were run.
        discarded: rounds, from 0, in which the GPU's clocks were lowered at any time. They are discarded for
            all workloads.
    """

    measurements: dict[str, Measurement]
    rounds: dict[str, tuple[float, ...]] = field(repr=False)
    n_rounds: int
    discarded: tuple[int, ...] = ()

    @property
    def inconclusive(self) -> bool:
        """True if more than a fifth of the rounds were discarded."""
        return len(self.discarded) > _MOST_DISCARDED * self.n_rounds

    def ratio(self, name: str, baseline: str) -> Ratio:
        """Return the time of `name` divided by the time of `baseline`. See also `inconclusive`.

        It is below 1 if `name` is faster.

        Raises:
            ValueError: unknown workload.
        """
        check_choice("name", name, self.rounds)
        check_choice("baseline", baseline, self.rounds)
        ratios = [a / b for a, b in zip(self.rounds[name], self.rounds[baseline], strict=True)]
        if not ratios:
            return Ratio(None, None, None, 0)
        middle = percentile(ratios, 50)
        return Ratio(middle.value, middle.low, middle.high, len(ratios))

    def speed_up(self, name: str, baseline: str) -> Ratio:
        """Return the time of `baseline` divided by the time of `name`. It is above 1 if `name` is faster.

        Raises:
            ValueError: unknown workload.
        """
        return self.ratio(baseline, name)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "measurements": {name: each.to_dict() for name, each in self.measurements.items()},
            "rounds": {name: list(each) for name, each in self.rounds.items()},
            "n_rounds": self.n_rounds,
            "discarded": list(self.discarded),
            "inconclusive": self.inconclusive,
        }


def interleave(
    workloads: Mapping[str, Workload],
    *,
    rounds: int = 32,
    turn_seconds: float = 0.02,
    seed: int = 0,
    clock: str = "host",
    cache: str = "warm",
    warmup_seconds: float = 2.0,
    steady_within: float = 0.005,
) -> Interleaved:
    """Measure workloads, interleaved.

    Each workload has its own warm-up. In each round, every workload is sampled for `turn_seconds`, at least
    once. If calls are shorter than that, one untimed call runs first, because the caches hold data of another
    workload. The order of a round is random, and the next round reverses it: the first workload of a round
    was measured to be about 1 % faster, and over two rounds this effect is balanced. The peak memory is not
    read, because it would include the other workloads.

    Args:
        workloads: workloads by name, all on one device.
        rounds: number of rounds. An even number is balanced.
        turn_seconds: seconds per workload and round, including `prepare` and cache flushes between samples.
        seed: seed of the order.
        clock: "host" or "device" (CUDA only).
        cache: "warm", or "cold": the last-level cache is flushed before each sample.
        warmup_seconds: time after the first window of a warm-up in which further windows may start, per
            workload.
        steady_within: relative difference of two windows below which the warm-up is steady.

    Raises:
        ValueError: no workloads, workloads on several devices, numbers out of range, or arguments that
            `measure` refuses.
        TypeError: not a mapping of names to workloads.
    """
    _check_workloads(workloads)
    check_sizes(rounds=rounds)
    check_number("turn_seconds", turn_seconds, "a number > 0", lambda value: value > 0)
    host, sensor = host_state(), GpuSensor(next(iter(workloads.values())).device)
    samplers = {
        name: Sampler(
            workload,
            clock=clock,
            cache=cache,
            warmup_seconds=warmup_seconds,
            steady_within=steady_within,
        )
        for name, workload in workloads.items()
    }
    with uncollected():
        orders = _orders(list(workloads), rounds, seed)
        done = [_round(samplers, order, turn_seconds, sensor) for order in orders]
    valid = [each for each in done if not each.throttled]
    states = [state for each in done for state in each.states]
    notes = notes_of(host, sensor)
    if not valid:
        notes = (*notes, _throttled_note(rounds, states))
    return Interleaved(
        measurements={
            name: sampler.measurement(
                [seconds for each in valid or done for seconds in each.samples[name]], host, states, notes
            )
            for name, sampler in samplers.items()
        },
        rounds={name: tuple(statistics.median(each.samples[name]) for each in valid) for name in samplers},
        n_rounds=rounds,
        discarded=tuple(number for number, each in enumerate(done) if each.throttled),
    )


def _check_workloads(workloads: Mapping[str, Workload]) -> None:
    if not isinstance(workloads, Mapping):
        raise TypeError(f"workloads: got {type(workloads).__name__}; wanted a mapping of names to workloads")
    for name, workload in workloads.items():
        check_workload(workload, f"workloads[{name!r}]")
    require(len(workloads) > 0, "workloads", workloads, "one or more, by name")
    devices = {workload.device for workload in workloads.values()}
    require(len(devices) == 1, "workloads", sorted(map(str, devices)), "all of them on one device")


@dataclass(frozen=True)
class _Round:
    """Samples of each workload in one round, and the states of the GPU around them."""

    samples: dict[str, list[float]]
    states: list[GpuState]

    @property
    def throttled(self) -> bool:
        return any(state.throttled for state in self.states)


def _orders(names: list[str], rounds: int, seed: int) -> Iterator[list[str]]:
    """Yield the order of each round: random, or every second time the reverse of the previous order."""
    shuffle = random.Random(seed).shuffle  # noqa: S311
    for number in range(rounds):
        if number % 2:
            names.reverse()
        else:
            shuffle(names)
        yield names


def _round(samplers: Mapping[str, Sampler], order: list[str], seconds: float, sensor: GpuSensor) -> _Round:
    collect_new()
    states, samples = [sensor.read()], {}
    for name in order:
        samples[name] = _turn(samplers[name], seconds)
        states.append(sensor.read())
    return _Round(samples, [state for state in states if state is not None])


def _throttled_note(rounds: int, states: list[GpuState]) -> str:
    reasons = sorted({reason for state in states for reason in state.throttle_reasons or ()})
    return (
        f"throttled: the GPU's clocks were held down in each of {rounds} rounds ({', '.join(reasons)}); "
        "these are the times of that, and nothing can be compared"
    )


def _turn(sampler: Sampler, seconds: float) -> list[float]:
    count = max(1, math.ceil(seconds / max(sampler.period_seconds, 1e-9)))
    if count > 1 and sampler.cache == "warm":
        sampler.take(1)
    return sampler.take(count)

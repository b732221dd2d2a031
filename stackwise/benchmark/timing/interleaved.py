"""Interleaved: several workloads measured in turns, so that what disturbs one disturbs all.

A machine is faster in one minute than in the next, by more than what is to be told apart. Samples of two
workloads that were taken within one round share its minute, and the ratio of the two does not know it.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping
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

# Of all rounds. Where more were throttled, the others were hardly free of it.
_MOST_DISCARDED = 0.2


@dataclass(frozen=True)
class Ratio:
    """How two workloads compare, over rounds.

    Attributes:
        median: of the ratios within a round; None where no round counts.
        low: end of an interval of order statistics that has the true median with a confidence of 95 %; None
            where the rounds are too few for one (below 6).
        high: its other end.
        rounds: that were counted.
    """

    median: float | None
    low: float | None
    high: float | None
    rounds: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Interleaved:
    """Workloads that were measured in turns.

    Attributes:
        measurements: of each, by name, without the samples of discarded rounds. Where every round was
            discarded they have those samples all the same, and a note that says so.
        rounds: seconds of a call in each round that counts: the median of its samples there, by name.
        n_rounds: how many were run.
        discarded: the rounds, from 0, in which the GPU's clocks were held down at any time. They count for
            none of the workloads.
    """

    measurements: dict[str, Measurement]
    rounds: dict[str, tuple[float, ...]] = field(repr=False)
    n_rounds: int
    discarded: tuple[int, ...] = ()

    @property
    def inconclusive(self) -> bool:
        """Whether more than a fifth of the rounds were discarded."""
        return len(self.discarded) > _MOST_DISCARDED * self.n_rounds

    def ratio(self, name: str, baseline: str) -> Ratio:
        """Time of `name` over time of `baseline`: below 1 where `name` is faster; see `inconclusive`.

        Raises:
            ValueError: a workload that was not measured.
        """
        check_choice("name", name, self.rounds)
        check_choice("baseline", baseline, self.rounds)
        ratios = [a / b for a, b in zip(self.rounds[name], self.rounds[baseline], strict=True)]
        if not ratios:
            return Ratio(None, None, None, 0)
        middle = percentile(ratios, 50)
        return Ratio(middle.value, middle.low, middle.high, len(ratios))

    def speed_up(self, name: str, baseline: str) -> Ratio:
        """How many times as fast `name` is as `baseline`: time of `baseline` over time of `name`.

        Raises:
            ValueError: a workload that was not measured.
        """
        return self.ratio(baseline, name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
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
    """Measure workloads in turns.

    Each is warmed up by itself. In each round every one has a turn: one call that is not timed where calls
    are shorter than a turn, since it finds the caches that another has left, then samples for `turn_seconds`,
    at least one. The order is random, and that of every second round is the one before reversed: who comes
    first is measured to be about 1 % faster, and over two rounds nobody does more often. The peak of
    memory is not read: the other workloads would be in it.

    Args:
        workloads: by name, all on one device.
        rounds: how many; an even number is balanced.
        turn_seconds: of one turn, with what is put back or flushed between its samples.
        seed: of the order.
        clock: "host" or "device" (CUDA only).
        cache: "warm", or "cold": the last-level cache is flushed before each sample.
        warmup_seconds: in which windows of the warm-up of one workload begin, after its first one.
        steady_within: relative difference of two windows that counts as settled.

    Raises:
        ValueError: no workloads, or on several devices; numbers out of range; what `measure` refuses.
        TypeError: no mapping of names to workloads.
    """
    if not isinstance(workloads, Mapping):
        raise TypeError(f"workloads: got {type(workloads).__name__}; wanted a mapping of names to workloads")
    for name, workload in workloads.items():
        check_workload(workload, f"workloads[{name!r}]")
    require(len(workloads) > 0, "workloads", workloads, "one or more, by name")
    devices = {workload.device for workload in workloads.values()}
    require(len(devices) == 1, "workloads", sorted(map(str, devices)), "all of them on one device")
    check_sizes(rounds=rounds)
    check_number("turn_seconds", turn_seconds, "a number > 0", lambda value: value > 0)
    host, sensor = host_state(), GpuSensor(devices.pop())
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
    taken: list[dict[str, list[float]]] = []
    throttled: list[dict[str, list[float]]] = []
    states: list[GpuState] = []
    discarded = []
    order, shuffle = list(workloads), random.Random(seed).shuffle  # noqa: S311
    with uncollected():
        for number in range(rounds):
            if number % 2:
                order.reverse()
            else:
                shuffle(order)
            collect_new()
            seen, samples = [sensor.read()], {}
            for name in order:
                samples[name] = _turn(samplers[name], turn_seconds)
                seen.append(sensor.read())
            states += [state for state in seen if state is not None]
            if any(state is not None and state.throttled for state in seen):
                discarded.append(number)
                throttled.append(samples)
            else:
                taken.append(samples)
    notes = notes_of(host, sensor)
    if not taken:
        reasons = sorted({reason for state in states for reason in state.throttle_reasons or ()})
        told = (
            f"throttled: the GPU's clocks were held down in each of {rounds} rounds ({', '.join(reasons)}); "
            "these are the times of that, and nothing can be compared"
        )
        notes = (*notes, told)
    return Interleaved(
        measurements={
            name: sampler.measurement(
                [s for each in taken or throttled for s in each[name]], host, states, notes
            )
            for name, sampler in samplers.items()
        },
        rounds={name: tuple(statistics.median(each[name]) for each in taken) for name in samplers},
        n_rounds=rounds,
        discarded=tuple(discarded),
    )


def _turn(sampler: Sampler, seconds: float) -> list[float]:
    count = max(1, math.ceil(seconds / max(sampler.period_seconds, 1e-9)))
    if count > 1 and sampler.cache == "warm":
        sampler.take(1)
    return sampler.take(count)

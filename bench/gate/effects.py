"""Effects: how much is added to a call so that it takes a given share longer, and whether it does.

Time decides what an effect is: the same call is made in turns with iterations and without within one
process, and its processor time, which others on the machine disturb least, says what one iteration is
worth. Then the time on the clock is measured in the same way for each effect, which on a quiet machine has
to be the share. Instructions are counted by callgrind, where that is installed, to show that what is added
is work.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

from bench.gate import command
from bench.gate.repository import SUITE, Added
from bench.isolated import isolated
from stackwise.benchmark.timing.percentile import percentile

__all__ = ["EFFECTS", "SAME", "Effect", "branches", "calibrate", "count_instructions"]


class Effect(NamedTuple):
    """What a branch does to each call.

    Attributes:
        share: of its time that is added.
        sleeps: whether that is spent asleep, and not working.
    """

    share: float
    sleeps: bool = False

    def __str__(self) -> str:
        return "A/A" if not self.share else f"{self.share:.0%}{' of sleep' if self.sleeps else ''}"


SAME = "same"
EFFECTS = {
    SAME: Effect(0.0),
    "up01": Effect(0.01),
    "up02": Effect(0.02),
    "up05": Effect(0.05),
    "up10": Effect(0.10),
    "wait": Effect(0.05, sleeps=True),
}
_PROBE = 0.25  # share that is added to find out what an iteration takes
_SHORTEST_SLEEP = 1e-6  # seconds
_CORRECTIONS = 3
_PAIRS = 16  # least of them, of which an interval is known in each order
_COUNT = (2, 6)  # calls within callgrind: what a start takes is the same in both


def calibrate(name: str, seconds: float) -> dict[str, Any]:
    """What each effect adds to a call, and what the call then takes, found in a process of its own.

    Args:
        name: of the call.
        seconds: that each of the measurements takes.

    Returns:
        `seconds` of the call on the processor, `iteration_share` of it, and `effects`: of each `iterations`,
        `sleep_seconds`, `on_cpu` (change of the processor time), and `change` of that on the clock with its
        95 % interval `low` and `high`.

    Raises:
        RuntimeError: it did not end well.
    """
    limit = 60 + 40 * seconds
    ended = isolated(partial(_calibrate, name, seconds), seconds=limit)
    if ended.error is not None:
        raise RuntimeError(f"{name}: {ended.error}")
    found: dict[str, Any] = ended.values[0]
    return found


def branches(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Added]:
    """What each branch adds, of what `calibrate` found for each call."""
    return {
        branch: Added(
            {name: of["effects"][branch]["iterations"] for name, of in found.items()},
            {
                name: of["effects"][branch]["sleep_seconds"]
                for name, of in found.items()
                if of["effects"][branch]["sleep_seconds"]
            },
        )
        for branch in EFFECTS
    }


def count_instructions(name: str, iterations: int) -> dict[str, float] | None:
    """Instructions of a call and of what is added to it; None where there is no callgrind."""
    if shutil.which("valgrind") is None:
        return None
    few, many = _COUNT
    start, plain, more = (_instructions(name, *each) for each in ((few, 0), (many, 0), (many, iterations)))
    call, added = (plain - start) / (many - few), (more - plain) / many
    return {"call": call, "added": added, "share": added / call}


def _calibrate(name: str, seconds: float) -> Iterator[dict[str, Any]]:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from bench.gate.suite.subject.work import prepare

    torch.set_num_threads(1)
    work = prepare(name)

    def with_added(iterations: int, asleep: float = 0.0) -> Callable[[], object]:
        def call() -> object:
            value = work(iterations)
            if asleep:
                time.sleep(asleep)
            return value

        return call

    plain = with_added(0)
    _ratios(plain, plain, seconds / 4)
    call_seconds = median(_timed(plain, time.thread_time) for _ in range(50))
    on_cpu = partial(_change, plain, timer=time.thread_time)
    probe = 1
    while on_cpu(with_added(probe), seconds / 20).value < _PROBE:
        probe *= 2
    share = on_cpu(with_added(probe), seconds).value / probe
    effects = {}
    for branch, effect in EFFECTS.items():
        iterations, asleep = 0, 0.0
        if effect.sleeps:
            asleep = _sleep_seconds(effect.share * call_seconds)
            for _ in range(_CORRECTIONS):  # a call that finds the caches cold takes longer, too
                more = _change(plain, with_added(0, asleep), seconds / 4).value - effect.share
                asleep = max(_SHORTEST_SLEEP, asleep - more * call_seconds)
        elif effect.share:
            iterations = max(1, round(effect.share / share))
        changed = with_added(iterations, asleep)
        found = _change(plain, changed, seconds)
        effects[branch] = {
            "iterations": iterations,
            "sleep_seconds": asleep,
            "on_cpu": on_cpu(changed, seconds / 2).value,
            "change": found.value,
            "low": found.low,
            "high": found.high,
        }
    yield {"seconds": call_seconds, "iteration_share": share, "effects": effects}


def _sleep_seconds(wanted: float) -> float:
    """How long to ask the system to sleep for, so that it takes this long: it always takes longer."""
    late = median(_timed(lambda: time.sleep(wanted)) for _ in range(100)) - wanted
    return max(_SHORTEST_SLEEP, wanted - late)


class _Change(NamedTuple):
    """How much longer a call takes, as a share, with its 95 % interval."""

    value: float
    low: float
    high: float


def _change(
    plain: Callable[[], object],
    other: Callable[[], object],
    seconds: float,
    timer: Callable[[], float] = time.perf_counter,
) -> _Change:
    """The mean of the medians of both orders: who comes second finds cold caches."""
    logs = [math.log(ratio) for ratio in _ratios(plain, other, seconds, timer)]
    orders = [percentile(logs[first::2], 50) for first in (0, 1)]
    value = mean(order.value for order in orders)
    half = math.hypot(*((order.high - order.low) / 2 for order in orders)) / len(orders)
    return _Change(*(math.expm1(each) for each in (value, value - half, value + half)))


def _ratios(
    plain: Callable[[], object],
    other: Callable[[], object],
    seconds: float,
    timer: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Of pairs of calls in turns, other / plain; who is first alternates."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < _PAIRS or time.perf_counter() < end:
        if len(found) % 2:
            second, first = _timed(other, timer), _timed(plain, timer)
        else:
            first, second = _timed(plain, timer), _timed(other, timer)
        found.append(second / first)
    return found


def _timed(call: Callable[[], object], timer: Callable[[], float] = time.perf_counter) -> float:
    start = timer()
    call()
    return timer() - start


def _instructions(name: str, calls: int, iterations: int) -> int:
    """Of a whole process that makes so many calls."""
    program = (
        f"import sys; sys.path.insert(0, {str(SUITE)!r}); from subject.work import prepare\n"
        f"work = prepare({name!r})\nfor _ in range({calls}): work({iterations})"
    )
    line = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, "-c", program]
    printed = command.run(line, SUITE, environment={"PYTHONHASHSEED": "0"})
    found = re.search(r"Collected : (\d+)", printed)
    if found is None:
        raise RuntimeError(f"callgrind did not say what it collected: {command.tail(printed)}")
    return int(found[1])


def worst_deviation(found: Mapping[str, Mapping[str, Any]]) -> float:
    """How far a change is from what was to be added, as a share of that: the largest of all calls."""
    return (
        max(
            abs(of["effects"][branch]["change"] / effect.share - 1)
            for of in found.values()
            for branch, effect in EFFECTS.items()
            if effect.share
        )
        if found
        else math.nan
    )

"""A step that is made again and again, to see whether it holds more each time, and what it holds."""

from __future__ import annotations

import gc
import json
import linecache
import sys
import sysconfig
import tracemalloc
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from stackwise.benchmark.memory import live_memory
from stackwise.benchmark.memory.growth import GrowingPlace, GrowingType, MemoryGrowth
from stackwise.benchmark.memory.live_memory import Bytes, Earlier, bytes_now, census
from stackwise.benchmark.memory.trend import LEAST_STEPS, Trend, trend
from stackwise.benchmark.plain_call import is_plain_call, kind_of, refuse_unstarted
from stackwise.subject.spec import ModelSpec
from stackwise.subject.trainer_spec import TrainerSpec, TrainingRun
from stackwise.support.arguments import check_number, check_sizes, require

__all__ = ["check_growth", "collected_by_hand", "memory_growth"]

STEPS, WARMUP, TOLERANCE = 40, 10, 1024
_MOST_STEPS = 1000
_NAMED = 5
_FRAMES = 16
_SMALL = 64  # bytes per step
_NODE = "autograd "
_PLAIN = ("collections", "functools", "weakref")
_TORCH, _PYTHON = str(Path(torch.__file__).parent), sysconfig.get_path("stdlib")
_LOOKING = (live_memory.__file__, tracemalloc.__file__)
_STEP = "a function that makes one step, or a TrainerSpec"
_COUNTED = ("tensors", "nodes", "objects", "callables", "hooks")


def check_growth(*, steps: int = STEPS, warmup: int = WARMUP, tolerance: float = TOLERANCE) -> None:
    """Refuse what `memory_growth` would refuse, without a step.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    check_sizes(LEAST_STEPS, steps=steps)
    require(steps <= _MOST_STEPS, "steps", steps, f"an integer from {LEAST_STEPS} to {_MOST_STEPS}")
    check_sizes(1, warmup=warmup)
    check_number("tolerance", tolerance, "a finite number >= 0, of bytes per step", lambda size: size >= 0)


def memory_growth(
    step: Callable[[], object] | TrainerSpec,
    *,
    steps: int = STEPS,
    warmup: int = WARMUP,
    tolerance: float = TOLERANCE,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> MemoryGrowth:
    """Make a step many times, and see what there is more of after each.

    The step is made `steps` times while bytes are read, and as often again while objects are counted; each
    time the garbage collector is run first. What rises is judged
    by its trend, not by its ends: the rise has to go on to the last quarter of the steps, and to exceed the
    tolerance with 99 % certainty. A cache that fills up within the first half of the steps, and a buffer
    that is emptied at least once in half of them, are not growth. One tensor, or one node of autograd's
    graph, more in each step is growth, however small it is; so is one hook, one function or anything else
    that can be called, more after each step without exception. Numbers and records that a run keeps of
    itself are not, below the tolerance.

    Python's allocations are traced the second time (tracemalloc), which slows a step down: this is no timing.
    What a step returns is dropped. Objects that `gc.freeze` had set aside are thawed.

    Args:
        step: what is made again and again; of a TrainerSpec a run, each step with another batch.
        steps: that are looked at, 8 to 1000, and made twice. Few steps see only what grows in each of them.
        warmup: steps before them: what is made once, such as the optimizer's state, is no growth.
        tolerance: bytes per step, for what a run may note of itself, such as a history of losses.
        device: whose memory is looked at beside the host's.
        seed: of the run that is made of a TrainerSpec.

    Raises:
        TypeError: `step` is a model or its class, or at its first call makes a model or a training instead
            of a step, a generator or a coroutine: nothing would be trained, and nothing grow.
        ValueError: a number out of range.
        RuntimeError: on CUDA, there is no such device.
    """
    check_growth(steps=steps, warmup=warmup, tolerance=tolerance)
    device = torch.device(device)
    call = _steps_of(step, device, seed) if isinstance(step, TrainerSpec) else step
    if not is_plain_call(call):
        raise TypeError(f"step: got {kind_of(step)}; wanted {_STEP}")
    _refuse_made(call())
    for _ in range(warmup - 1):
        call()
    with collected_by_hand() as earlier:
        held = _Held(device, steps)
        for index in range(steps):
            _make(call)
            held.read(index)
        with _traced():
            alive = _Alive(earlier, steps)
            for index in range(steps):
                _make(call)
                alive.read(index)
    trends: dict[str, Any] = {**held.trends(), **alive.trends()}
    return MemoryGrowth(
        steps=steps,
        warmup=warmup,
        tolerance=tolerance,
        **trends,
        cyclic_bytes=held.cyclic(),
        types=alive.types(),
        places=alive.places(),
    )


def _refuse_made(result: object) -> None:
    """Refuse a step whose first call has made what was to be trained, or what would have to run first."""
    refuse_unstarted(result, "step")
    if isinstance(result, nn.Module | ModelSpec | TrainerSpec | TrainingRun):
        run = ", a TrainingRun" if isinstance(result, TrainingRun) else ""
        raise TypeError(f"step: its first call returned {kind_of(result)}{run}; wanted {_STEP}")


def _make(call: Callable[[], object]) -> None:
    """One step, and nothing else: an object was made by it where this line is in its traceback."""
    call()


def _steps_of(spec: TrainerSpec, device: torch.device, seed: int) -> Callable[[], object]:
    run = spec.create(device, seed)
    used = next((parameter.device for parameter in run.model.parameters()), device)
    number = 0

    def step() -> None:
        nonlocal number
        run.step(spec.batch(device=used, seed=number))
        number += 1

    return step


@contextmanager
def collected_by_hand() -> Iterator[Earlier]:
    """Inside, garbage is collected when it is asked for, and only among new objects.

    Gives what there was before. What was frozen already is not afterwards: one could not tell
    the two apart, and an object that stays frozen may never be collected.
    """
    collects = gc.isenabled()
    gc.collect()
    earlier = Earlier.now()
    gc.disable()
    gc.freeze()
    try:
        yield earlier
    finally:
        gc.unfreeze()
        if collects:
            gc.enable()


@contextmanager
def _traced() -> Iterator[None]:
    """Inside, Python's allocations are traced."""
    starts = not tracemalloc.is_tracing()
    if starts:
        tracemalloc.start(_FRAMES)
    try:
        yield
    finally:
        if starts:
            tracemalloc.stop()


class _Held:
    """Bytes that are held after each step, in memory that is there before the first."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self._device = device
        self._names = [
            field.name for field in fields(Bytes) if getattr(bytes_now(device), field.name) is not None
        ]
        self._values = {name: array("q", bytes(8 * steps)) for name in (*self._names, "blocks", "cyclic")}

    def read(self, index: int) -> None:
        """Look at what is held after step `index`."""
        uncollected = bytes_now(self._device)
        gc.collect()
        self._values["blocks"][index] = sys.getallocatedblocks()
        now = bytes_now(self._device)
        for name in self._names:
            self._values[name][index] = getattr(now, name)
        name = "device" if "device" in self._names else "host"
        if name in self._names:
            self._values["cyclic"][index] = getattr(uncollected, name) - getattr(now, name)

    def trends(self) -> dict[str, Trend | None]:
        """Of bytes in use, of those that an allocator keeps beyond them, and of Python's small blocks."""
        found: dict[str, Trend | None] = {"blocks": trend(self._values["blocks"])}
        for name in ("host", "device"):
            found[name] = found[f"{name}_free"] = None
            if name in self._names:
                used, kept = self._values[name], self._values[f"{name}_kept"]
                found[name] = trend(used)
                found[f"{name}_free"] = trend([more - less for more, less in zip(kept, used, strict=True)])
        return found

    def cyclic(self) -> int:
        """The median of what a step left to the collector."""
        return max(0, round(median(self._values["cyclic"])))


class _Alive:
    """Objects that are alive after each step; what is kept of them is left out of the bytes that are read."""

    def __init__(self, earlier: Earlier, steps: int) -> None:
        self._earlier = earlier
        self._values = {name: array("q", bytes(8 * steps)) for name in ("python", *_COUNTED)}
        # Where quarters end. What grows is named from these; as text they are no objects to be counted.
        self._ends = [steps * quarter // 4 - 1 for quarter in (1, 2, 3, 4)]
        self._kept = [""] * len(self._ends)
        self._snapshots: list[tracemalloc.Snapshot] = []
        self._own = 0

    def read(self, index: int) -> None:
        """Look at what is alive after step `index`."""
        gc.collect()
        self._values["python"][index] = tracemalloc.get_traced_memory()[0] - self._own
        seen = census(self._earlier)
        for name in _COUNTED:
            self._values[name][index] = getattr(seen, name)
        del seen
        if index in self._ends:
            self._keep(index)

    def _keep(self, index: int) -> None:
        outer = index in (self._ends[0], self._ends[-1])
        seen = census(
            self._earlier, names=True, sizes=outer
        )  # makes Python's views of storages, which are not ours
        before = tracemalloc.get_traced_memory()[0]
        self._kept[self._ends.index(index)] = json.dumps([seen.counts, seen.sizes])
        if outer:
            self._snapshots.append(tracemalloc.take_snapshot())
        self._own += tracemalloc.get_traced_memory()[0] - before

    def trends(self) -> dict[str, Trend]:
        """Of the bytes of Python's allocators, and of the numbers of objects."""
        return {name: trend(values) for name, values in self._values.items()}

    def types(self) -> tuple[GrowingType, ...]:
        """Those whose number rises from each end of a quarter to the next, or whose bytes rise in all."""
        distance = self._ends[-1] - self._ends[0]
        counts, sizes = zip(*map(json.loads, self._kept), strict=True)
        found = []
        for name, last in counts[-1].items():
            numbers = [count.get(name, 0) for count in counts]
            size = (sizes[-1].get(name, 0) - sizes[0].get(name, 0)) / distance
            if all(after > before for before, after in pairwise(numbers)) or size > _SMALL:
                found.append(GrowingType(name, (last - numbers[0]) / distance, size))
        found.sort(
            key=lambda each: (_is_plain(each.name), -each.bytes_per_step, -each.count_per_step, each.name)
        )
        nodes = [each for each in found if each.name.startswith(_NODE)]
        objects = [each for each in found if not each.name.startswith(_NODE)]
        return tuple(objects[:_NAMED] + nodes[:_NAMED])

    def places(self) -> tuple[GrowingPlace, ...]:
        """Lines of which an object stays at least every second step."""
        first, last = self._snapshots
        distance = self._ends[-1] - self._ends[0]
        counts: Counter[tuple[str, int]] = Counter()
        for difference in last.compare_to(first, "traceback"):
            if 2 * difference.count_diff >= distance and (place := _place(difference.traceback)) is not None:
                counts[place] += difference.count_diff
        return tuple(
            GrowingPlace(file, line, linecache.getline(file, line).strip(), count / distance)
            for (file, line), count in counts.most_common(_NAMED)
        )


def _is_plain(name: str) -> bool:
    """Whether a type says little of whose objects these are."""
    return "." not in name or name.partition(".")[0] in _PLAIN


def _place(traceback: tracemalloc.Traceback) -> tuple[str, int] | None:
    """The innermost line that is no library's; None where it was our looking that made the object."""
    chosen = None
    for frame in reversed(traceback):
        file, line = frame.filename, frame.lineno
        if file == __file__ or file in _LOOKING:
            made = _make.__code__.co_firstlineno
            return chosen if file == __file__ and line == made + 2 else None
        if chosen is None and not _is_library(file):
            chosen = (file, line)
    return chosen


def _is_library(file: str) -> bool:
    """Whether it is torch's or Python's own: a user looks for the line that calls these."""
    in_python = file.startswith(_PYTHON) and "site-packages" not in file
    return in_python or file.startswith((_TORCH, "<"))

"""Repeated steps that show if memory grows, and which objects grow."""

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
    """Raise ValueError for arguments that `memory_growth` refuses, without a step.

    Raises:
        ValueError: the message names the argument, its value and the allowed values.
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
    """Run a step many times and return the trends of memory and objects.

    The step runs `steps` times while bytes are read, and `steps` more times while objects are counted.
    Garbage is collected after each step. A rise is judged by its trend: it must continue in the last quarter
    of the steps and exceed the tolerance with 99 % confidence. A cache that fills up within the first half of
    the steps is not growth, nor is a buffer that is emptied at least once within half of the steps. One
    additional tensor or node of autograd's graph per step is growth, independent of its size. One additional
    hook, function or other callable is growth if its number rises after every step without exception. Numbers
    and records of a run, such as a history, are not growth below the tolerance.

    During the second pass, Python's allocations are traced (tracemalloc), which slows the step down. Do not
    use it for timing. Results of the step are dropped. Objects that `gc.freeze` had frozen are unfrozen.

    Args:
        step: function to repeat. For a TrainerSpec, the steps of a run, each with another batch.
        steps: number of measured steps per pass, 8 to 1000. A small number detects only growth in every step.
        warmup: number of steps before the measurement. Objects that are created only once, such as the
            optimizer state, are not growth.
        tolerance: bytes per step that are allowed for records of a run, such as a history of losses.
        device: device whose memory is read in addition to the host's.
        seed: seed of the run of a TrainerSpec.

    Raises:
        TypeError: `step` is a model or its class, or its first call returns a model, a training run, a
            generator or a coroutine instead of running a step.
        ValueError: a number out of range.
        RuntimeError: the CUDA device does not exist.
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
    """Raise TypeError if the first call of a step returned the object to be trained, or unstarted work."""
    refuse_unstarted(result, "step")
    if isinstance(result, nn.Module | ModelSpec | TrainerSpec | TrainingRun):
        run = ", a TrainingRun" if isinstance(result, TrainingRun) else ""
        raise TypeError(f"step: its first call returned {kind_of(result)}{run}; wanted {_STEP}")


def _make(call: Callable[[], object]) -> None:
    """Run one step. Objects of the step have this line in their traceback, so keep this function's layout."""
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
    """Context in which garbage is collected only on request, and only among new objects.

    It yields the objects that existed before. Objects that were already frozen are unfrozen afterwards,
    because they cannot be distinguished from the newly frozen ones, and a frozen object may never be
    collected.
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
    """Context in which Python's allocations are traced."""
    starts = not tracemalloc.is_tracing()
    if starts:
        tracemalloc.start(_FRAMES)
    try:
        yield
    finally:
        if starts:
            tracemalloc.stop()


class _Held:
    """Bytes in use after each step, stored in memory that is allocated before the first step."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self._device = device
        self._names = [
            field.name for field in fields(Bytes) if getattr(bytes_now(device), field.name) is not None
        ]
        self._values = {name: array("q", bytes(8 * steps)) for name in (*self._names, "blocks", "cyclic")}

    def read(self, index: int) -> None:
        """Read the bytes in use after step `index`."""
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
        """Return the trends of used bytes, of free bytes of the allocators, and of Python's small blocks."""
        found: dict[str, Trend | None] = {"blocks": trend(self._values["blocks"])}
        for name in ("host", "device"):
            found[name] = found[f"{name}_free"] = None
            if name in self._names:
                used, kept = self._values[name], self._values[f"{name}_kept"]
                found[name] = trend(used)
                found[f"{name}_free"] = trend([more - less for more, less in zip(kept, used, strict=True)])
        return found

    def cyclic(self) -> int:
        """Return the median bytes per step that only the garbage collector could free."""
        return max(0, round(median(self._values["cyclic"])))


class _Alive:
    """Live objects after each step. The memory of these records is subtracted from the traced bytes."""

    def __init__(self, earlier: Earlier, steps: int) -> None:
        self._earlier = earlier
        self._values = {name: array("q", bytes(8 * steps)) for name in ("python", *_COUNTED)}
        # Last steps of the quarters. Growing types are derived from their counts, which are stored as text,
        # so that they add no objects.
        self._ends = [steps * quarter // 4 - 1 for quarter in (1, 2, 3, 4)]
        self._kept = [""] * len(self._ends)
        self._snapshots: list[tracemalloc.Snapshot] = []
        self._own = 0

    def read(self, index: int) -> None:
        """Count the live objects after step `index`."""
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
        )  # creates Python's views of storages, which belong to the tensors
        before = tracemalloc.get_traced_memory()[0]
        self._kept[self._ends.index(index)] = json.dumps([seen.counts, seen.sizes])
        if outer:
            self._snapshots.append(tracemalloc.take_snapshot())
        self._own += tracemalloc.get_traced_memory()[0] - before

    def trends(self) -> dict[str, Trend]:
        """Return the trends of the bytes of Python's allocators and of the numbers of objects."""
        return {name: trend(values) for name, values in self._values.items()}

    def types(self) -> tuple[GrowingType, ...]:
        """Return the types whose number rises in each quarter, or whose bytes rise over all quarters."""
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
        """Return the lines of code that add an object at least every second step."""
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
    """Return True if the name of a type does not identify the owner of its objects."""
    return "." not in name or name.partition(".")[0] in _PLAIN


def _place(traceback: tracemalloc.Traceback) -> tuple[str, int] | None:
    """Return the innermost line outside of libraries. None: the measurement itself created the object."""
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
    """Return True for a file of torch or Python. Users need the line that calls the library."""
    in_python = file.startswith(_PYTHON) and "site-packages" not in file
    return in_python or file.startswith((_TORCH, "<"))

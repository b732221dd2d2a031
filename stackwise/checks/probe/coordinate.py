"""Coordinates: how large activations and their changes are, and by which power of the width they go.

The coordinate check of Yang et al. 2022, "Tensor Programs V" (arXiv:2203.03466), appendix D.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from stackwise.checks.probe.batch import tensors_in

__all__ = [
    "LIMIT",
    "UNUSUAL",
    "Coordinates",
    "Slope",
    "Training",
    "coordinates_of",
    "first_of",
    "slopes_of",
    "worst_of",
]

# Sums over n random terms go as the root of n, sums over aligned ones as n. What is scaled wrongly has a
# power that is off by 1/2 or more, and half-way to that lies 1/4. Powers of finite widths and few seeds are
# a tenth or so off, for which the limit leaves room.
UNUSUAL, LIMIT = 0.25, 0.35
_SCORES = ": scores"
_MASKED = -1e3  # scores below are those of keys that are not seen


@dataclass(frozen=True)
class Training:
    """A model of some width, and a step of its training.

    Attributes:
        model: on its device, in eval mode.
        forward: the model's output on the batch that it trains on, without gradients.
        update: one optimizer step on that batch.
    """

    model: nn.Module
    forward: Callable[[], Tensor]
    update: Callable[[], object]


@dataclass(frozen=True)
class Coordinates:
    """What one training showed, by module.

    "" is the model's own output, "NAME: scores" what the softmax in the module NAME takes. A module that
    hands on what another one made is left out.

    Attributes:
        sizes: mean absolute value of the module's output at each step, before the first one first; modules
            are in the order in which they come to an end, the model last.
        changes: the same of its difference to what it was before the first step.
        read: modules whose output is what the readout reads, the module that makes the model's output.
    """

    sizes: Mapping[str, tuple[float, ...]]
    changes: Mapping[str, tuple[float, ...]]
    read: frozenset[str]


@dataclass(frozen=True)
class Slope:
    """By which power of the width something goes.

    Attributes:
        module: as in `Coordinates`.
        kind: of the output's size, or of its change since step 0.
        step: how many steps had been made.
        sizes: by width, the geometric mean over seeds.
        value: the least-squares slope of log size over log width, the mean over seeds; infinite where a size
            is not finite.
        standard_error: of that mean; None of one seed.
        expected: what it is where a model is independent of its width.
        exact: whether a smaller slope than expected is a finding as well. Not so of the output: a random
            readout scaled by 1 / width is smaller, the wider the model. Nor of scores of attention: products
            of random queries and keys scaled by 1 / head size are smaller, the larger a head.
    """

    module: str
    kind: Literal["size", "change"]
    step: int
    sizes: tuple[float, ...]
    value: float
    standard_error: float | None
    expected: float = 0.0
    exact: bool = True

    @property
    def distance(self) -> float:
        """How far it is from what is expected."""
        off = self.value - self.expected
        return abs(off) if self.exact else max(off, 0.0)

    @property
    def judged(self) -> bool:
        """Whether a verdict asks for it: sizes at the start and changes, since later sizes are their sum."""
        return self.kind == "change" or self.step == 0

    @property
    def what(self) -> str:
        """In words."""
        if self.step == 0:
            return "size at the start"
        return f"{self.kind} after {self.step} step{'s' * (self.step > 1)}"

    @property
    def where(self) -> str:
        """The module's name."""
        return {"": "the output", _SCORES: "scores"}.get(self.module, self.module)


def coordinates_of(training: Training, steps: int) -> Coordinates:
    """Train for `steps`, and see what it does to every module's output.

    Memory is that of two passes' activations in float64. On any device the host waits for each pass.
    """
    first, read = _seen(training)
    sizes = {name: [_size(x)] for name, x in first.items()}
    changes = {name: [0.0] for name in first}
    for _ in range(steps):
        training.update()
        now, _ = _seen(training)
        for name in list(sizes):
            same = name in now and now[name].shape == first[name].shape
            sizes[name].append(_size(now[name]) if same else math.nan)
            changes[name].append(_size(now[name] - first[name]) if same else math.nan)
    return Coordinates(
        {name: tuple(each) for name, each in sizes.items()},
        {name: tuple(each) for name, each in changes.items()},
        frozenset(read),
    )


def slopes_of(widths: Sequence[float], found: Sequence[Sequence[Coordinates]]) -> tuple[Slope, ...]:
    """Slopes of every module over `widths`, of size and change at each step, in the order of modules.

    Left out are modules that not all widths have, and what is 0 at a width.

    What the readout reads may go as 1 / width, in size and change: the multiplier that muP has the logits
    multiplied by may as well stand before the readout.

    Args:
        widths: at least two different ones, in any unit.
        found: for each of them one for each seed, of trainings of equally many steps.
    """
    every = [each for by_seed in found for each in by_seed]
    slopes = []
    for name in [n for n in every[0].sizes if all(n in each.sizes for each in every)]:
        made: dict[tuple[str, int], Slope] = {}
        exact = bool(name) and not name.endswith(_SCORES)
        for kind in ("size", "change"):
            for step in range(kind == "change", len(every[0].sizes[name])):
                rows = [
                    [(each.sizes if kind == "size" else each.changes)[name][step] for each in by_width]
                    for by_width in zip(*found, strict=True)
                ]
                slope = _slope(widths, rows)
                if slope is None:
                    continue
                sizes = tuple(_geometric(column) for column in zip(*rows, strict=True))
                error = stdev(slope) / math.sqrt(len(slope)) if _finite(slope) and len(slope) > 1 else None
                value = fmean(slope) if _finite(slope) else math.inf
                made[kind, step] = Slope(name, kind, step, sizes, value, error, exact=exact)
        scaled = name in every[0].read and ("size", 0) in made and made["size", 0].value < -0.5
        slopes += [replace(slope, expected=-1.0) if scaled else slope for slope in made.values()]
    return tuple(slopes)


def first_of(slopes: Sequence[Slope], limit: float = LIMIT) -> Slope | None:
    """The judged slope that is beyond `limit` first: at the earliest step, of the module that runs first.

    What comes after takes over what is wrong before it, and often to a higher power.
    """
    off = (slope for slope in slopes if slope.judged and slope.distance > limit)
    return min(off, key=lambda slope: slope.step, default=None)


def worst_of(slopes: Sequence[Slope]) -> Slope | None:
    """The judged slope that is farthest from what is expected; None: there is none."""
    return max((s for s in slopes if s.judged), key=lambda s: (s.distance, abs(s.value)), default=None)


def _seen(training: Training) -> tuple[dict[str, Tensor], set[str]]:
    """The output of each module at its last call, in float64, and which of them the readout reads."""
    seen = _Pass()
    with ExitStack() as stack:
        stack.enter_context(seen.hooked(training.model))
        # Of a fused kernel nothing is seen but its output.
        stack.enter_context(sdpa_kernel([SDPBackend.MATH]))
        stack.enter_context(_Scores(seen))
        logits = training.forward().detach().to(torch.float64, copy=True)
    found: dict[str, Tensor] = {}
    entered = []
    for name in seen.order:
        if name in seen.scores:
            found[f"{name}{_SCORES}"] = torch.cat(seen.scores[name])
        output = seen.outputs.get(name)
        if output is not None and _equal(output, logits):
            entered.append(seen.inputs.get(name))
        elif output is not None:
            found[name] = output
    read = {name for name, x in found.items() if any(e is not None and _equal(x, e) for e in entered)}
    return found | {"": logits}, read


class _Pass:
    """What modules take and give while a model runs once.

    Attributes:
        inputs: by module, the first activation that it takes.
        outputs: by module that makes a new activation, the first one that it gives.
        scores: by module, what each softmax in it takes, flat; 0 where a key is masked.
        order: the names of modules as they came to an end, the last time each.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.scores: dict[str, list[Tensor]] = {}
        self.order: dict[str, None] = {}
        self._running: list[str] = []
        self._made: list[Tensor] = []  # kept, so that no other tensor is taken for one of them

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._after(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def softmax(self, scores: Tensor) -> None:
        """Note what a softmax of attention takes: (..., queries, keys), one matrix for each head."""
        square = scores.ndim == 3 and scores.shape[-1] == scores.shape[-2]
        if (scores.ndim >= 4 or square) and self._running:
            wide = scores.detach().double()
            visible = wide.isfinite() & (wide > _MASKED) | wide.isnan()
            name = self._running[-1]
            self.scores.setdefault(name, []).append(wide.where(visible, wide.new_zeros(())).flatten())

    def _before(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append(name)
            self.scores.pop(name, None)  # of a call before this one
            entered = _activation((*args, *kwargs.values()))
            if entered is not None:
                self.inputs[name] = entered.detach().to(torch.float64, copy=True)

        return note

    def _after(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(_: nn.Module, _args: Any, output: Any) -> None:
            self._running.pop()
            self.order.pop(name, None)
            self.order[name] = None
            made = _activation((output,))
            if made is None or any(made is each for each in self._made):
                return
            self._made.append(made)
            if name:
                self.outputs[name] = made.detach().to(torch.float64, copy=True)

        return note


class _Scores(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a pass of every softmax, whatever made it."""

    def __init__(self, seen: _Pass) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in ("_softmax", "_safe_softmax"):
            self.seen.softmax(args[0])
        return function(*args, **(kwargs or {}))


def _activation(values: Any) -> Tensor | None:
    """The first floating-point tensor that is no single number."""
    return next((t for t in tensors_in(values) if t.is_floating_point() and t.numel() > 1), None)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.numel() == other.numel() and torch.equal(one.flatten(), other.flatten())


def _size(x: Tensor) -> float:
    return x.abs().mean().item() if x.numel() else math.nan


def _finite(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) for value in values)


def _geometric(values: Sequence[float]) -> float:
    return math.exp(fmean(map(math.log, values))) if _finite(values) and min(values) > 0 else math.inf


def _slope(widths: Sequence[float], rows: Sequence[Sequence[float]]) -> list[float] | None:
    """By seed, the least-squares slope of log size over log width; None where a size is 0."""
    if not all(_finite(row) for row in rows):
        return [math.inf]
    if any(min(row) <= 0 for row in rows):
        return None
    x = [math.log(width) for width in widths]
    centred = [each - fmean(x) for each in x]
    spread = math.fsum(each * each for each in centred)
    return [
        math.fsum(c * math.log(size) for c, size in zip(centred, row, strict=True)) / spread for row in rows
    ]

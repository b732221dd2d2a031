"""Coordinates: size of activations and of their changes, and its growth with the width of the model.

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
from stackwise.support.hooks import temporary_hooks

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

# Sums over n random terms grow with the root of n, sums over aligned terms with n. A wrong scale changes the
# power by 1/2 or more; 1/4 is half of that. Powers of finite widths and few seeds have an error of about 0.1.
UNUSUAL, LIMIT = 0.25, 0.35
_SCORES = ": scores"
_MASKED = -1e3  # lower scores belong to hidden keys


@dataclass(frozen=True)
class Training:
    """Model of a width, and its training step.

    Attributes:
        model: the model, on its device and in eval mode.
        forward: returns the output for the training batch, without gradients.
        update: takes one optimizer step on this batch.
    """

    model: nn.Module
    forward: Callable[[], Tensor]
    update: Callable[[], object]


@dataclass(frozen=True)
class Coordinates:
    """Sizes of activations in one training, by module.

    "" is the output of the model, "NAME: scores" the input of the softmax in module NAME. Modules that return
    the output of another module are left out.

    Attributes:
        sizes: mean absolute value of the module's output before the first step and after each step. Modules
            are in the order in which they finish, the model last.
        changes: mean absolute value of its difference from that before the first step.
        read: modules with an output that is the input of the readout, which computes the model's output.
    """

    sizes: Mapping[str, tuple[float, ...]]
    changes: Mapping[str, tuple[float, ...]]
    read: frozenset[str]


@dataclass(frozen=True)
class Slope:
    """Power of the width with which a size grows.

    Attributes:
        module: name, as in `Coordinates`.
        kind: "size" of the output, or its "change" since step 0.
        step: number of finished steps.
        sizes: geometric mean over seeds, by width.
        value: least-squares slope of log size over log width, as a mean over seeds. inf if a size is not
            finite.
        standard_error: standard error of this mean. None: one seed.
        expected: slope of a model that is independent of its width.
        exact: a smaller slope than expected is a finding as well. False for the output, because a random
            readout scaled by 1 / width decreases with the width, and for scores, because products of random
            queries and keys scaled by 1 / head size decrease with the head size.
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
        """Distance from the expected slope."""
        difference = self.value - self.expected
        return abs(difference) if self.exact else max(difference, 0.0)

    @property
    def judged(self) -> bool:
        """True for sizes at the start and for changes. Later sizes are their sum."""
        return self.kind == "change" or self.step == 0

    @property
    def what(self) -> str:
        """Kind and step in words."""
        if self.step == 0:
            return "size at the start"
        return f"{self.kind} after {self.step} step{'s' * (self.step > 1)}"

    @property
    def where(self) -> str:
        """Name of the module."""
        return {"": "the output", _SCORES: "scores"}.get(self.module, self.module)


def coordinates_of(training: Training, steps: int) -> Coordinates:
    """Train for `steps` steps and return the sizes of every module's output.

    Needs memory for the activations of two passes in float64. The host waits for each pass.
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
    """Return the slopes of every module over `widths`, of size and change at each step.

    Modules that some width lacks, and sizes of 0, are left out. The input of the readout may shrink with
    1 / width, because the multiplier of the logits in muP may be applied before the readout.

    Args:
        widths: at least two different widths, in any unit.
        found: coordinates by width and seed, with the same number of steps.
    """
    every = [each for by_seed in found for each in by_seed]
    slopes = []
    for name in [n for n in every[0].sizes if all(n in each.sizes for each in every)]:
        steps = range(len(every[0].sizes[name]))
        places: list[tuple[Literal["size", "change"], int]] = [("size", step) for step in steps]
        places += [("change", step) for step in steps[1:]]
        of_module = [_slope_at(widths, found, name, *place) for place in places]
        known = [slope for slope in of_module if slope is not None]
        first = of_module[0]
        scaled = name in every[0].read and first is not None and first.value < -0.5
        slopes += [replace(slope, expected=-1.0) if scaled else slope for slope in known]
    return tuple(slopes)


def _slope_at(
    widths: Sequence[float],
    found: Sequence[Sequence[Coordinates]],
    name: str,
    kind: Literal["size", "change"],
    step: int,
) -> Slope | None:
    """Return the slope, over the width, of the size or the change of a module's outputs. None: size 0."""
    rows = [
        [(each.sizes if kind == "size" else each.changes)[name][step] for each in by_width]
        for by_width in zip(*found, strict=True)
    ]
    slope = _slope(widths, rows)
    if slope is None:
        return None
    sizes = tuple(_geometric(column) for column in zip(*rows, strict=True))
    error = stdev(slope) / math.sqrt(len(slope)) if _finite(slope) and len(slope) > 1 else None
    value = fmean(slope) if _finite(slope) else math.inf
    exact = bool(name) and not name.endswith(_SCORES)
    return Slope(name, kind, step, sizes, value, error, exact=exact)


def first_of(slopes: Sequence[Slope], limit: float = LIMIT) -> Slope | None:
    """Return the judged slope beyond `limit` at the earliest step, in the module that runs first.

    Later modules inherit its error, often with a higher power.
    """
    beyond = (slope for slope in slopes if slope.judged and slope.distance > limit)
    return min(beyond, key=lambda slope: slope.step, default=None)


def worst_of(slopes: Sequence[Slope]) -> Slope | None:
    """Return the judged slope with the largest distance, or None if there is none."""
    return max((s for s in slopes if s.judged), key=lambda s: (s.distance, abs(s.value)), default=None)


def _seen(training: Training) -> tuple[dict[str, Tensor], set[str]]:
    """Return the output of each module at its last call in float64, and the inputs of the readout."""
    seen = _Pass()
    with ExitStack() as stack:
        stack.enter_context(seen.hooked(training.model))
        # A fused kernel hides its scores.
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
    """Inputs and outputs of modules in one call of a model.

    Attributes:
        inputs: first activation among the inputs, by module.
        outputs: first activation among the outputs, by module. Modules that return no new one are left out.
        scores: inputs of each softmax, flat, by module. 0 for masked keys.
        order: names of modules in the order in which they finished.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.scores: dict[str, list[Tensor]] = {}
        self.order: dict[str, None] = {}
        self._running: list[str] = []
        self._outputs: list[Tensor] = []  # references, so that no id is reused

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._after(name)))
        with temporary_hooks(handles):
            yield

    def softmax(self, scores: Tensor) -> None:
        """Record the input of a softmax of attention (..., queries, keys), one matrix per head."""
        square = scores.ndim == 3 and scores.shape[-1] == scores.shape[-2]
        if (scores.ndim >= 4 or square) and self._running:
            wide = scores.detach().double()
            visible = wide.isfinite() & (wide > _MASKED) | wide.isnan()
            name = self._running[-1]
            self.scores.setdefault(name, []).append(wide.where(visible, wide.new_zeros(())).flatten())

    def _before(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._running.append(name)
            self.scores.pop(name, None)  # from an earlier call
            entered = _activation((*args, *kwargs.values()))
            if entered is not None:
                self.inputs[name] = entered.detach().to(torch.float64, copy=True)

        return note

    def _after(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(_: nn.Module, _args: Any, output: Any) -> None:
            self._running.pop()
            self.order.pop(name, None)
            self.order[name] = None
            activation = _activation((output,))
            if activation is None or any(activation is each for each in self._outputs):
                return
            self._outputs.append(activation)
            if name:
                self.outputs[name] = activation.detach().to(torch.float64, copy=True)

        return note


class _Scores(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record every softmax in a pass."""

    def __init__(self, seen: _Pass) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in ("_softmax", "_safe_softmax"):
            self.seen.softmax(args[0])
        return function(*args, **(kwargs or {}))


def _activation(values: Any) -> Tensor | None:
    """Return the first floating-point tensor with more than one element."""
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
    """Return the least-squares slope of log size over log width by seed, or None if a size is 0."""
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

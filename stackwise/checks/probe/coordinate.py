"""Coordinates: size of activations and of their changes, and its growth with the width of the model.

The coordinate check of Yang et al. 2022, "Tensor Programs V" (arXiv:2203.03466), appendix D.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean, linear_regression, stdev
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stackwise.checks.probe.batch import tensors_in
from stackwise.checks.probe.operations import Operations
from stackwise.checks.probe.recorded_calls import watched_modules

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
        for name, x in first.items():
            same = name in now and now[name].shape == x.shape
            sizes[name].append(_size(now[name]) if same else math.nan)
            changes[name].append(_size(now[name] - x) if same else math.nan)
    of_size, of_change = ({name: tuple(x) for name, x in each.items()} for each in (sizes, changes))
    return Coordinates(of_size, of_change, frozenset(read))


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
        start, *later = [_slope_at(widths, found, name, "size", step) for step in steps]
        later += [_slope_at(widths, found, name, "change", step) for step in steps[1:]]
        scaled = name in every[0].read and start is not None and start.value < -0.5
        known = [slope for slope in (start, *later) if slope is not None]
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
    columns = list(zip(*rows, strict=True))
    sizes = tuple(geometric_mean(each) if _is_positive(each) else math.inf for each in columns)
    exact = bool(name) and not name.endswith(_SCORES)
    if not all(math.isfinite(size) for row in rows for size in row):
        return Slope(name, kind, step, sizes, math.inf, None, exact=exact)
    if not all(map(_is_positive, rows)):
        return None
    x = [math.log(width) for width in widths]
    slopes = [linear_regression(x, [math.log(size) for size in row]).slope for row in rows]
    error = stdev(slopes) / math.sqrt(len(slopes)) if len(slopes) > 1 else None
    return Slope(name, kind, step, sizes, fmean(slopes), error, exact=exact)


def _is_positive(sizes: Sequence[float]) -> bool:
    return all(0 < size < math.inf for size in sizes)


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
    """Return the output of each module at its last call in float64, and the inputs of the readout.

    Modules that return no new activation are left out. A module with softmaxes of attention also has scores:
    their inputs in its last call, 0 for masked keys.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    scores: dict[str, list[Tensor]] = {}
    order: dict[str, None] = {}  # modules in the order in which they finish
    running: list[str] = []
    activations: list[Tensor] = []

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        running.append(name)
        scores.pop(name, None)  # from an earlier call
        if (activation := _activation(arguments)) is not None:
            inputs[name] = _wide(activation)

    def after(name: str, output: Any) -> None:
        running.pop()
        order.pop(name, None)
        order[name] = None
        activation = _activation(output)
        if activation is not None and not any(activation is each for each in activations):
            activations.append(activation)
            if name:
                outputs[name] = _wide(activation)

    def softmax(name: str, args: Any, _: Any) -> None:
        if name not in ("_softmax", "_safe_softmax") or not running:
            return
        is_matrix_of_head = args[0].ndim == 3 and args[0].shape[-1] == args[0].shape[-2]
        if args[0].ndim > 3 or is_matrix_of_head:
            wide = _wide(args[0])
            visible = wide.isfinite() & (wide > _MASKED) | wide.isnan()
            scores.setdefault(running[-1], []).append(wide.masked_fill(~visible, 0.0).flatten())

    # A fused kernel hides its scores.
    with watched_modules(training.model, before, after), sdpa_kernel([SDPBackend.MATH]), Operations(softmax):
        logits = _wide(training.forward())
    found: dict[str, Tensor] = {}
    entered = []
    for name in order:
        if name in scores:
            found[f"{name}{_SCORES}"] = torch.cat(scores[name])
        if name in outputs and _equal(outputs[name], logits):
            entered += [inputs[name]] if name in inputs else []
        elif name in outputs:
            found[name] = outputs[name]
    read = {name for name, x in found.items() if any(_equal(x, each) for each in entered)}
    return found | {"": logits}, read


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.float64, copy=True)


def _activation(values: Any) -> Tensor | None:
    """Return the first floating-point tensor with more than one element."""
    return next((t for t in tensors_in(values) if t.is_floating_point() and t.numel() > 1), None)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.numel() == other.numel() and torch.equal(one.flatten(), other.flatten())


def _size(x: Tensor) -> float:
    return x.abs().mean().item() if x.numel() else math.nan

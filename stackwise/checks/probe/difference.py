"""Differences between two outputs, and whether they are there or only rounding.

A difference is measured against how much the output *varies*, not against how large it is: a large
constant (a bias, columns at -1e9 for a padded vocabulary) would hide everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stackwise.checks.probe.call import REFUSALS, dtype_of
from stackwise.checks.subject import Subject

__all__ = [
    "NOT_REPEATED",
    "Finding",
    "absolute_difference",
    "coarsest_rounding",
    "hear",
    "relative_difference",
    "repeats",
    "uses_less_than_float64",
    "variation",
]

# Differences beyond this are no rounding, even where float64 does not show them: then a kernel or a
# branch that only the model's own dtype takes is wrong.
_GROSS = 1e-3
_EXACT_SAME = 1e-8
_EXACT_OTHER = 1e-6
_NARROW = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)


NOT_REPEATED = "needs a model that repeats itself in eval mode; see determinism"


@dataclass(frozen=True)
class Finding:
    """A difference after its hearing.

    Attributes:
        value: the largest measured difference.
        limit: what passes.
        real: whether it is more than rounding.
        dtype: where it was measured.
        gaps: all that was measured there, of any shape.
    """

    value: float
    limit: float
    real: bool
    dtype: torch.dtype
    gaps: Tensor = field(default_factory=lambda: torch.zeros(()), compare=False, repr=False)

    @property
    def meaning(self) -> str:
        """Where it was measured, if not in float64."""
        return "" if self.dtype == torch.float64 else f"measured in {str(self.dtype).removeprefix('torch.')}"


def hear(
    subject: Subject,
    measure: Callable[[nn.Module], Tensor | float],
    *,
    same_shapes: bool,
    train: bool = False,
    fill_zeros: bool = False,
) -> Finding:
    """Measure in the model's own dtype and in float64, and decide.

    Rounding shrinks by 1e9 from float32 to float64, a defect does not; so float64 decides, both ways:
    it acquits a large float32 difference, and finds one that float32 swallows. A model that cannot run
    in float64 is judged by its own dtype alone.

    Args:
        subject: the model.
        measure: model -> differences relative to the output's variation, of any shape; the largest counts.
        same_shapes: whether all that is compared has equal shapes. Sound models then repeat themselves
            nearly to the bit; other shapes mean another order of sums.
        train: measure in train mode.
        fill_zeros: measure with zero weights made random.
    """
    native = subject.model(train=train, fill_zeros=fill_zeros)
    dtype = dtype_of(native)
    eps = 0.0 if same_shapes else torch.finfo(dtype).eps
    gaps = torch.as_tensor(measure(native), dtype=torch.float64)
    value = gaps.max().item()
    limit = max(subject.spec.tolerance, 8 * eps)
    try:
        twin = subject.model(train=train, dtype=torch.float64, fill_zeros=fill_zeros)
        exact_gaps = torch.as_tensor(measure(twin), dtype=torch.float64)
    except REFUSALS:
        return Finding(value, limit, not value <= limit, dtype, gaps)
    exact = exact_gaps.max().item()
    exact_limit = _EXACT_SAME if same_shapes else _EXACT_OTHER
    if value <= limit and not math.isfinite(exact) and uses_less_than_float64(twin, measure):
        # The lowest float64 overflows in a softmax that stays float32: the twin is broken, not the model.
        return Finding(value, limit, False, dtype, gaps)
    if exact_limit < exact <= _EXACT_OTHER and uses_less_than_float64(twin, measure):
        exact_limit = _EXACT_OTHER
    if exact <= exact_limit and not value <= max(_GROSS, 64 * eps):
        return Finding(value, limit, True, dtype, gaps)
    return Finding(exact, exact_limit, not exact <= exact_limit, torch.float64, exact_gaps)


def repeats(subject: Subject) -> bool:
    """Whether two calls in eval mode agree where one follows the other in the same random state.

    Else one seed gives other numbers to other shapes, and a comparison across shapes or orders shows these.
    """
    model, inputs = subject.model(), subject.inputs(1)
    with torch.no_grad(), subject.fixed_randomness():
        one, two = (subject.spec.logits(model, inputs.clone()) for _ in range(2))
    return bool(relative_difference(one, two).max() <= _EXACT_OTHER)


def uses_less_than_float64(model: nn.Module, measure: Callable[[nn.Module], object]) -> bool:
    """Whether parts of a float64 model compute in a narrower dtype, whose rounding remains."""
    return coarsest_rounding(model, measure) > 0


def coarsest_rounding(model: nn.Module, measure: Callable[[nn.Module], object]) -> float:
    """Return the eps of the narrowest dtype in which a float64 model computes, or 0.0 if it is float64."""
    watch = _Narrow()  # type: ignore[no-untyped-call]
    with watch:
        measure(model)
    return watch.eps


class _Narrow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the eps of the narrowest floating-point result below float64."""

    eps: float = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and output.dtype in _NARROW:
            self.eps = max(self.eps, torch.finfo(output.dtype).eps)
        return output


def absolute_difference(a: Tensor, b: Tensor) -> Tensor:
    """Element-wise |a - b| in float64; 0 where both are the same, NaN included; else inf where not finite."""
    same = (a == b) | (a.isnan() & b.isnan())
    difference = (a.double() - b.double()).abs()
    return difference.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(same, 0.0)


def variation(output: Tensor) -> Tensor:
    """Return the largest distance of a channel of `output` (B, T, C) from its first finite value, in float64.

    A distance below eps^(3/4) of the size is rounding, as for a row of equal tokens without absolute
    positions. The size is that of the channel, or the lower quartile of all channels: sums may end near 0. If
    no channel varies, return the largest finite size; if that is 0, return 1.
    """
    rounding = torch.finfo(output.dtype).eps ** 0.75 if output.is_floating_point() else 0.0
    output = output.double().flatten(0, -2)
    finite = output.isfinite()
    first = output.gather(0, finite.long().argmax(dim=0, keepdim=True))
    distances = (output - first).abs().where(finite, 0.0).amax(dim=0)
    sizes = output.abs().where(finite, 0.0).amax(dim=0)
    usual = sizes.kthvalue(1 + (len(sizes) - 1) // 4).values if len(sizes) else sizes
    for candidates in (distances[distances > rounding * sizes.maximum(usual)], sizes):
        if candidates.numel() and candidates.max() > 0:
            return candidates.max()
    return torch.ones((), dtype=torch.float64, device=output.device)


def relative_difference(a: Tensor, b: Tensor) -> Tensor:
    """Element-wise difference of two outputs (B, T, C) over the variation of the first."""
    return absolute_difference(a, b) / variation(a)

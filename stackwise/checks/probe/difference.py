"""Difference of two outputs, and the decision if it is more than rounding.

A difference is relative to the variation of the output, not to its size. A large constant (a bias, columns at
-1e9 for a padded vocabulary) would hide everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.probe.call import REFUSALS, dtype_of
from stackwise.checks.probe.operations import Operations
from stackwise.checks.subject import Subject

__all__ = [
    "NOT_REPEATED",
    "Finding",
    "absolute_difference",
    "coarsest_rounding",
    "measure_difference",
    "relative_difference",
    "repeats",
    "same_bits",
    "uses_less_than_float64",
    "variation",
]

# A larger difference is a defect even if float64 does not show it: a kernel or a branch for the model's own
# dtype is wrong.
_GROSS = 1e-3
# Largest difference in float64 that is rounding, if shapes differ and so the order of sums.
_EXACT = 1e-6
_NARROW = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)

NOT_REPEATED = "needs a model that repeats itself in eval mode; see determinism"


@dataclass(frozen=True)
class Finding:
    """Difference that was measured in two dtypes.

    Attributes:
        value: largest difference.
        limit: largest value that passes.
        real: True if the difference is more than rounding.
        dtype: dtype of the measurement that decided.
    """

    value: float
    limit: float
    real: bool
    dtype: torch.dtype

    @property
    def meaning(self) -> str:
        """Dtype of the measurement in words, or "" for float64."""
        return "" if self.dtype == torch.float64 else f"measured in {str(self.dtype).removeprefix('torch.')}"


def measure_difference(
    subject: Subject, measure: Callable[[nn.Module], Tensor | float], *, fill_zeros: bool = False
) -> Finding:
    """Measure a difference in the model's own dtype and in float64, and decide if it is more than rounding.

    Rounding shrinks by 1e9 from float32 to float64, and a defect does not. So float64 decides: it discards a
    large float32 difference, and finds one that is below the rounding of float32. If the model does not run
    in float64, its own dtype decides.

    Args:
        subject: the model.
        measure: model -> differences relative to the output's variation, of any shape. The largest decides.
        fill_zeros: measure with zero weights replaced by random ones.
    """
    native = subject.model(fill_zeros=fill_zeros)
    dtype = dtype_of(native)
    eps = torch.finfo(dtype).eps
    value = _largest(measure(native))
    limit = max(subject.spec.tolerance, 8 * eps)
    try:
        wide = subject.model(dtype=torch.float64, fill_zeros=fill_zeros)
        exact = _largest(measure(wide))
    except REFUSALS:
        return Finding(value, limit, not value <= limit, dtype)
    if value <= limit and not math.isfinite(exact) and uses_less_than_float64(wide, measure):
        # A mask constant of float64 overflows in a softmax that stays float32. The model itself is healthy.
        return Finding(value, limit, False, dtype)
    if exact <= _EXACT and not value <= max(_GROSS, 64 * eps):
        return Finding(value, limit, True, dtype)
    return Finding(exact, _EXACT, not exact <= _EXACT, torch.float64)


def _largest(differences: Tensor | float) -> float:
    return torch.as_tensor(differences, dtype=torch.float64).max().item()


def repeats(subject: Subject) -> bool:
    """Return True if two consecutive calls in eval mode agree.

    Otherwise one seed gives other numbers to other shapes, so a comparison across shapes is meaningless.
    """
    model, inputs = subject.model(), subject.inputs(1)
    with torch.no_grad(), subject.fixed_randomness():
        one, two = (subject.spec.logits(model, inputs.clone()) for _ in range(2))
    return bool(relative_difference(one, two).max() <= _EXACT)


def uses_less_than_float64(model: nn.Module, measure: Callable[[nn.Module], object]) -> bool:
    """Return True if parts of a float64 model compute in a narrower dtype, so that its rounding remains."""
    return coarsest_rounding(model, measure) > 0


def coarsest_rounding(model: nn.Module, measure: Callable[[nn.Module], object]) -> float:
    """Return the eps of the narrowest dtype in which a float64 model computes, or 0.0 if it is float64."""
    dtypes: set[torch.dtype] = set()

    def record(_: str, __: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            dtypes.add(output.dtype)

    with Operations(record):
        measure(model)
    return max((torch.finfo(dtype).eps for dtype in dtypes.intersection(_NARROW)), default=0.0)


def absolute_difference(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b| in float64: 0 for equal elements, NaN included, and inf for other non-finite ones."""
    same = (a == b) | (a.isnan() & b.isnan())
    difference = (a.double() - b.double()).abs()
    return difference.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(same, 0.0)


def variation(output: Tensor) -> Tensor:
    """Return the largest distance of a channel of `output` (B, T, C) from its first finite value, in float64.

    A distance below eps^(3/4) of the size is rounding, as for a row of equal tokens without absolute
    positions. The size is that of the channel, or the lower quartile of all channels: sums may be close to 0.
    If no channel varies, return the largest finite size; if that is 0, return 1.
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
    """Return the difference of two outputs (B, T, C), relative to the variation of the first."""
    return absolute_difference(a, b) / variation(a)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if the shapes and all bits are equal, also those of NaN and of float8."""
    # One expanded element is contiguous, but has a stride of 0, which view refuses.
    one, two = (each.detach().flatten().clone(memory_format=torch.contiguous_format) for each in (a, b))
    one, two = one.view(torch.uint8), two.view(torch.uint8)
    return a.shape == b.shape and torch.equal(one, two)

"""Differences between two outputs, relative to their size, and whether they are only rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stackwise.checks.check import Subject

__all__ = ["persists_in_float64", "relative_difference"]

_FLOAT64_ROUNDING = 1e-9


def relative_difference(a: Tensor, b: Tensor) -> Tensor:
    """Element-wise |a - b| / max|a|; an element that is finite in one of them only is infinitely far."""
    difference = (a.double() - b.double()).abs()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = difference.masked_fill(same, 0.0).nan_to_num(nan=torch.inf)
    finite = a[a.isfinite()]
    scale = finite.abs().max().double() if finite.numel() else torch.tensor(1.0, dtype=torch.float64)
    return difference / scale.clamp(min=torch.finfo(torch.float32).tiny)


def persists_in_float64(
    subject: Subject, measure: Callable[[nn.Module], float], *, train: bool = False
) -> bool:
    """Whether a difference found in float32 is there in float64 too, where rounding shrinks by 1e9.

    A model that cannot run in float64 gets no such second hearing: the float32 finding stands.
    """
    try:
        return measure(subject.model(train=train, dtype=torch.float64)) > _FLOAT64_ROUNDING
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return True

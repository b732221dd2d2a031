"""Gradient norms: of every parameter in one pass, and of all of them together, left on the device.

Shapes: P gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from stackwise.support.arguments import require

__all__ = [
    "GradientNames",
    "clip_divisor",
    "first_non_finite",
    "global_norm",
    "gradient_norms",
    "norms_by_rows",
]

# Squares of float32 overflow above 2**64. Times 2**-80 those of its largest value do not, and what that
# loses is nothing beside a sum that overflowed without it.
_DOWN, _UP = 2.0**-80, 2.0**80
_SMALL = 2.0**-40  # of squares far below it, which float32 rounds to 0, nothing is seen beside them


def gradient_norms(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm of every gradient, float32, on the first gradient's device: (P,).

    Parameters without a gradient are left out. One fused kernel group for each dtype and device, no host
    synchronisation. Squares are summed in float64: in float32 those of finite gradients can overflow. Of
    sharded gradients (DTensor) these are the norms of the whole, which is one reduction of P numbers.

    Raises:
        ValueError: a sparse gradient.
    """
    return _norms([p.grad for p in parameters if p.grad is not None])


def _norms(gradients: Sequence[Tensor]) -> Tensor:
    if not gradients:
        return torch.zeros(0)
    # Of one dtype and device, so that the fused kernel takes them.
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, g in enumerate(gradients):
        groups.setdefault((g.dtype, g.device), []).append(index)
    norms: list[Tensor] = [gradients[0]] * len(gradients)
    for (dtype, device), indices in groups.items():
        members = [gradients[i] for i in indices]
        for g in members:
            require(g.layout == torch.strided, "gradients", g.layout, "torch.strided")
        if dtype.is_complex:
            members = [torch.view_as_real(g) for g in members]
        if device.type == "cpu" and all(type(g) is Tensor for g in members):
            found: Sequence[Tensor] = _by_rows_checked(members)
        else:
            wide = torch.float32 if device.type == "mps" else torch.float64  # which has no float64
            found = torch._foreach_norm(members, 2, dtype=wide)
        for index, norm in zip(indices, found, strict=True):
            norms[index] = norm
    first = norms[0].device
    if len(groups) > 1:
        norms = [norm.to(first, non_blocking=True) for norm in norms]
    norms_P = torch.stack(norms)
    if hasattr(norms_P, "full_tensor"):
        norms_P = norms_P.full_tensor()
    return norms_P.float()


def _by_rows_checked(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Float64 norms on the CPU, where a reduction that widens is a tenth as fast as one that does not.

    Rows are summed in float32 and their norms in float64. What lost its large or small values by that is
    summed again; on the CPU nothing waits for the answer.
    """
    norms = []
    for g in gradients:
        narrow = torch.float32 if g.dtype.itemsize < 4 else g.dtype
        if g.ndim > 1 and g.numel():
            rows = torch.linalg.vector_norm(g, dim=-1, dtype=narrow)
            norm = torch.linalg.vector_norm(rows, dtype=torch.float64)
            if _SMALL < norm.numpy() < math.inf:
                norms.append(norm)
                continue
        norms.append(torch.linalg.vector_norm(g, dtype=torch.float64))
    return norms


def global_norm(norms_P: Tensor) -> Tensor:
    """The norm of all gradients as one vector: the root of the sum of squares, not the sum of norms."""
    wide = norms_P if norms_P.device.type == "mps" else norms_P.double()
    norm: Tensor = torch.linalg.vector_norm(wide)
    return norm.float()


def norms_by_rows(gradients: Sequence[Tensor]) -> Tensor:
    """L2 norm of each of `gradients`, float32: (P,). To be compiled into one pass over them.

    Summed first along rows, which in float32 is a hundred times as exact for large matrices as one sum. A
    second sum, of gradients scaled down (as in Blue 1978, doi:10.1145/355769.355771), is taken where the
    first overflows. Uncompiled, `gradient_norms` holds fewer copies.
    """
    norms = []
    for g in gradients:
        g = torch.view_as_real(g) if g.is_complex() else g
        g = g.to(torch.promote_types(g.dtype, torch.float32))
        total, scaled = ((s.sum(-1) if s.ndim else s).sum() for s in (g.square(), (g * _DOWN).square()))
        norms.append(torch.where(total.isfinite(), total.sqrt(), scaled.sqrt() * _UP))
    return torch.stack([norm.float() for norm in norms])


def first_non_finite(norms: dict[str, float] | None) -> str | None:
    """The first of named norms that is infinite or no number; None where there is none."""
    return next((name for name, norm in (norms or {}).items() if not math.isfinite(norm)), None)


def clip_divisor(total_norm: Tensor, max_norm: float) -> Tensor:
    """What gradients are divided by so that their global norm is at most `max_norm`: at least 1.

    Args:
        total_norm: their global L2 norm, a scalar tensor.
        max_norm: the limit.
    """
    return ((total_norm + 1e-6) / max_norm).clamp(min=1.0)


class GradientNames:
    """Tells which parameters have a gradient.

    Args:
        named: parameters with their names.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._named = named
        self._present: tuple[bool, ...] = ()
        self._names: tuple[str, ...] = ()

    def __call__(self) -> tuple[str, ...]:
        """Their names, in the order of `gradient_norms`: most often as a step before, and kept then."""
        present = tuple(p.grad is not None for _, p in self._named)
        if present != self._present:
            self._names = tuple(name for (name, _), has in zip(self._named, present, strict=True) if has)
            self._present = present
        return self._names

"""Gradient norms: norm of each gradient in one pass, and global norm, computed on the device.

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

# In float32, squares of numbers above 2**64 overflow. Scaled by 2**-80, the squares of all numbers are
# finite. The small numbers that this scaling loses are negligible in a sum that overflows without it.
_DOWN, _UP = 2.0**-80, 2.0**80
_SMALL = 2.0**-40  # in a norm above it, squares that float32 rounds to 0 are negligible


def gradient_norms(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the L2 norm of every gradient, float32, on the device of the first gradient: (P,).

    Parameters without a gradient are skipped. Each combination of dtype and device uses one fused group of
    kernels, without host synchronisation. Squares are summed in float64, because a float32 sum of finite
    gradients can overflow. For sharded gradients (DTensor), the result is the norm of the full gradient,
    which needs one reduction of P numbers.

    Raises:
        ValueError: a gradient is sparse.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(0)
    # The fused kernel needs tensors of one dtype and device.
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, g in enumerate(gradients):
        groups.setdefault((g.dtype, g.device), []).append(index)
    norms: dict[int, Tensor] = {}
    for indices in groups.values():
        norms.update(zip(indices, _norms_of_group([gradients[i] for i in indices]), strict=True))
    if len(groups) > 1:
        norms = {i: norm.to(norms[0].device, non_blocking=True) for i, norm in norms.items()}
    norms_P = torch.stack([norms[i] for i in range(len(gradients))])
    if hasattr(norms_P, "full_tensor"):
        norms_P = norms_P.full_tensor()
    return norms_P.float()


def _norms_of_group(gradients: list[Tensor]) -> Sequence[Tensor]:
    for g in gradients:
        require(g.layout == torch.strided, "gradients", g.layout, "torch.strided")
    if gradients[0].is_complex():
        gradients = [torch.view_as_real(g) for g in gradients]
    device = gradients[0].device.type
    if device == "cpu" and all(type(g) is Tensor for g in gradients):
        return _by_rows_checked(gradients)
    wide = torch.float32 if device == "mps" else torch.float64  # MPS has no float64
    return torch._foreach_norm(gradients, 2, dtype=wide)


def _by_rows_checked(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return float64 norms on the CPU, where a reduction in a wider dtype is ten times slower.

    Rows are summed in float32 and their norms in float64. If this loses large or small values, the norm is
    computed again in float64. Reading the norm costs no synchronisation on the CPU.
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
    """Return the norm of all gradients as one vector: the root of the sum of squared norms."""
    wide = norms_P if norms_P.device.type == "mps" else norms_P.double()
    norm: Tensor = torch.linalg.vector_norm(wide)
    return norm.float()


def norms_by_rows(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each of `gradients`, float32: (P,). Intended for compilation into a single pass.

    Squares are summed along rows first. In float32 and for large matrices, this is a hundred times more
    accurate than a single sum. If this sum overflows, a sum of scaled gradients is used (as in Blue 1978,
    doi:10.1145/355769.355771). Without compilation, `gradient_norms` needs fewer copies.
    """
    norms = []
    for g in gradients:
        g = torch.view_as_real(g) if g.is_complex() else g
        g = g.to(torch.promote_types(g.dtype, torch.float32))
        total, scaled = ((s.sum(-1) if s.ndim else s).sum() for s in (g.square(), (g * _DOWN).square()))
        norms.append(torch.where(total.isfinite(), total.sqrt(), scaled.sqrt() * _UP))
    return torch.stack([norm.float() for norm in norms])


def first_non_finite(norms: dict[str, float] | None) -> str | None:
    """Return the name of the first non-finite norm. Return None if all norms are finite."""
    return next((name for name, norm in (norms or {}).items() if not math.isfinite(norm)), None)


def clip_divisor(total_norm: Tensor, max_norm: float) -> Tensor:
    """Return the divisor that reduces the global norm of gradients to at most `max_norm`. It is at least 1.

    Args:
        total_norm: global L2 norm of the gradients, a scalar tensor.
        max_norm: maximum of the norm.
    """
    return ((total_norm + 1e-6) / max_norm).clamp(min=1.0)


class GradientNames:
    """Callable that returns the names of the parameters with a gradient.

    Args:
        named: parameters with their names.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._named = named
        self._present: tuple[bool, ...] = ()
        self._names: tuple[str, ...] = ()

    def __call__(self) -> tuple[str, ...]:
        """Return the names in the order of `gradient_norms`.

        They are cached until the set of gradients changes.
        """
        present = tuple(p.grad is not None for _, p in self._named)
        if present != self._present:
            self._names = tuple(name for (name, _), has in zip(self._named, present, strict=True) if has)
            self._present = present
        return self._names

"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in float32.

Shapes: B batch, T positions, H heads, D head size.
The pairs are (i, i + D/2), as in Llama and the Hugging Face models.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotary_tables", "rotate"]


def rotary_tables(positions_T: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cos and sin of position * theta^(-2i/D): float32, each (T, D/2), for float32 positions (T,)."""
    exponent = torch.arange(0, head_dim, 2, device=positions_T.device, dtype=torch.float32) / head_dim
    angle = positions_T[:, None] * theta**-exponent
    return angle.cos(), angle.sin()


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate each pair of `x_BHTD` by its position's angle.

    Computed in float32 (float64 for float64 input) and returned in the dtype of `x_BHTD`:
    bfloat16 angles make neighbouring positions beyond 256 identical.
    """
    wide = x_BHTD.to(torch.promote_types(x_BHTD.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((first * cos_TD - second * sin_TD, second * cos_TD + first * sin_TD), dim=-1)
    return rotated.to(x_BHTD.dtype)

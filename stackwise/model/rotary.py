"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in float32 or float64.

Shapes: B batch, T positions, H heads, D head size.
The pairs are (i, i + D/2), as in Llama and the Hugging Face models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stackwise.config import RopeScalingConfig

__all__ = ["Rotary", "constant_tables", "rotate"]


_known: dict[str, Rotary] = {}  # by key: a compiler can store a string, but not an object


@dataclass(frozen=True)
class Rotary:
    """Rotary frequencies of a head.

    Attributes:
        head_dim: D, even.
        theta: base; frequency i is theta^(-2i/D) before scaling.
        scaling: see `RopeScalingConfig`.
        key: all fields as text.
    """

    head_dim: int
    theta: float = 10_000.0
    scaling: RopeScalingConfig | None = None
    key: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.head_dim} {self.theta} {self.scaling}")
        _known[self.key] = self

    def __reduce__(self) -> tuple[type[Rotary], tuple[int, float, RopeScalingConfig | None]]:
        """Copy and unpickle through the constructor, which registers the object in each process."""
        return type(self), (self.head_dim, self.theta, self.scaling)

    def frequencies(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the radians per position: (D/2,)."""
        exponent = torch.arange(0, self.head_dim, 2, device=device, dtype=dtype) / self.head_dim
        frequency = self.theta**-exponent
        if self.scaling is None:
            return frequency
        divided = frequency / self.scaling.factor
        if self.scaling.rope_type == "linear":
            return divided
        # As in Llama 3.1, the number of turns of a pair within the original context selects the scaling.
        turns = self.scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        low, high = self.scaling.low_freq_factor, self.scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return kept * frequency + (1 - kept) * divided

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin for positions (T,) or (B, T): (T, D/2) or (B, 1, T, D/2), in their dtype."""
        angle = positions[..., None] * self.frequencies(positions.device, positions.dtype)
        if angle.ndim == 3:
            angle = angle[:, None]
        return angle.cos(), angle.sin()


def constant_tables(
    key: str, seq_len: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return `tables` of positions 0 to `seq_len` - 1 of the Rotary with this key, as constants.

    For a compiler, the formula would mean to recompute cosine and sine for each head, layer and pass.
    """
    with torch.inference_mode(False), torch.no_grad():
        return _known[key].tables(torch.arange(seq_len, device=device, dtype=dtype))


# The effect of torch.compiler.assume_constant_result, which would import the compiler: a slow import.
constant_tables._dynamo_marked_constant = True  # type: ignore[attr-defined]


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate each pair of `x_BHTD` by its position's angle.

    Computed in float32 (float64 for float64 input) and returned in the dtype of `x_BHTD`: with bfloat16
    angles, neighbouring positions beyond 256 would be identical.
    """
    wide = x_BHTD.to(torch.promote_types(x_BHTD.dtype, torch.float32))
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((first * cos_TD - second * sin_TD, second * cos_TD + first * sin_TD), dim=-1)
    return rotated.to(x_BHTD.dtype)

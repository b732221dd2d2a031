"""HalfOverflow: raises values above the range of float16, as in float16 training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stackwise.stability.faults.place import PlaceFault
from stackwise.support.arguments import check_number

__all__ = ["HalfOverflow"]

_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class HalfOverflow(PlaceFault):
    """Fault that scales a tensor to `factor` times the maximum of float16, and rounds it to float16.

    Elements above 65504, the largest float16 number, become infinite. All elements are rounded to the 11 bits
    of float16. The effect is the same in every precision of the model, so the CPU shows the effect of a
    float16 run.

    Attributes:
        target: "activation" or "gradient", optionally with a colon and a pattern; see PlaceFault.
        factor: factor above 1. A larger factor makes more elements overflow.
    """

    name: ClassVar[str] = "half_overflow"
    places: ClassVar[tuple[str, ...]] = ("activation", "gradient")

    factor: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"{self.name}: factor", self.factor, "a finite number > 1", lambda factor: factor > 1)

    def changed(self, tensor: Tensor) -> Tensor:  # noqa: D102
        # In float32, because the product exceeds float16. A tensor of zeros stays zero.
        largest = tensor.detach().abs().max().float().clamp_min(torch.finfo(torch.float32).tiny)
        return (tensor.float() / largest * (self.factor * _LARGEST)).half().to(tensor.dtype)

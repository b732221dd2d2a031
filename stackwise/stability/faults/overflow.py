"""HalfOverflow: values beyond what float16 holds, as training in it meets them."""

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
    """Multiplies a tensor until its largest element is `factor` times what float16 holds, and rounds it.

    What is above the largest number of float16, 65504, becomes infinite; all else is rounded to its 11 bits.
    It is the same in every precision of the model, so that the CPU shows what a run in float16 would do.

    Attributes:
        target: "activation" or "gradient", with or without a pattern after a colon; see PlaceFault.
        factor: above 1; the larger, the more elements overflow.
    """

    name: ClassVar[str] = "half_overflow"
    places: ClassVar[tuple[str, ...]] = ("activation", "gradient")

    factor: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"{self.name}: factor", self.factor, "a finite number > 1", lambda factor: factor > 1)

    def changed(self, tensor: Tensor) -> Tensor:  # noqa: D102
        # In float32, since the product is more than float16 holds; a tensor of zeros stays one of zeros.
        largest = tensor.detach().abs().max().float().clamp_min(torch.finfo(torch.float32).tiny)
        return (tensor.float() / largest * (self.factor * _LARGEST)).half().to(tensor.dtype)

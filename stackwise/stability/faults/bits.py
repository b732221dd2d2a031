"""BitFlip: flips one bit of one number, like a memory error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stackwise.stability.faults.place import PlaceFault, place_of
from stackwise.support.arguments import check_sizes, require

__all__ = ["BitFlip"]

# Integer types of the same width, in which a bit can be flipped.
_INTEGERS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Index of the sign bit. A flip in the upper bits of the exponent has the largest effect.
_SIGN = {torch.float16: 15, torch.bfloat16: 15, torch.float32: 31, torch.float64: 63}


@dataclass(frozen=True)
class BitFlip(PlaceFault):
    """Fault that flips one bit of one element.

    Attributes:
        target: "weight", "activation", "gradient" or "optimizer_state", optionally with a colon and a
            pattern; see PlaceFault.
        bit: index of the bit, counted from the lowest; the sign is the highest. None: highest bit of the
            exponent, which turns an ordinary number into a huge one, and 0 into 2.
    """

    name: ClassVar[str] = "bit_flip"
    places: ClassVar[tuple[str, ...]] = ("weight", "activation", "gradient", "optimizer_state")

    target: str = "weight"
    bit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bit is not None:
            check_sizes(0, **{f"{self.name}: bit": self.bit})

    def changed(self, tensor: Tensor) -> Tensor:  # noqa: D102
        sign = _SIGN.get(tensor.dtype, 8 * tensor.element_size() - 1)
        bit = sign - 1 if self.bit is None else self.bit
        require(bit <= sign, f"{self.name}: bit", bit, f"at most {sign}, the sign of {tensor.dtype}")
        index = place_of(tensor.shape, self.seed)
        mask = torch.zeros_like(tensor, dtype=torch.bool)
        mask[index] = True
        integers = _INTEGERS[tensor.element_size()]
        power = 1 << bit
        if bit == 8 * tensor.element_size() - 1 and integers is not torch.uint8:
            power -= 1 << (bit + 1)  # in two's complement, the highest bit has a negative value
        flipped = (tensor.detach()[index].clone().view(integers) ^ power).view(tensor.dtype)
        return torch.where(mask, flipped, tensor)

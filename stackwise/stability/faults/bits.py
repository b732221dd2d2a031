"""BitFlip: one bit of one number, as a memory error leaves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stackwise.stability.faults.place import PlaceFault, place_of
from stackwise.support.arguments import check_sizes, require

__all__ = ["BitFlip"]

# The integers of the same width, in which a bit can be flipped.
_INTEGERS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Below the sign: of float64 63, of float16 15. The upper bits of the exponent are what shows.
_SIGN = {torch.float16: 15, torch.bfloat16: 15, torch.float32: 31, torch.float64: 63}


@dataclass(frozen=True)
class BitFlip(PlaceFault):
    """Flips one bit of one element.

    Attributes:
        target: "weight", "activation", "gradient" or "optimizer_state", with or without a pattern after a
            colon; see PlaceFault.
        bit: counted from the lowest, the sign being the highest; None: the highest of the exponent, which
            turns a usual number into a huge one, and a 0 into 2.
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
            power -= 1 << (bit + 1)  # in two's complement, the highest bit alone is the least number
        flipped = (tensor.detach()[index].clone().view(integers) ^ power).view(tensor.dtype)
        return torch.where(mask, flipped, tensor)

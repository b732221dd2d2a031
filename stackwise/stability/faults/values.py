"""Faults in the values of a tensor: a NaN or an infinity, a flipped bit, an overflow of float16."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stackwise.stability.faults.fault import Acted
from stackwise.stability.faults.place import PlaceFault, place_of
from stackwise.support.arguments import check_choice, check_number, check_sizes, require

__all__ = ["BitFlip", "HalfOverflow", "NanInjection"]


_VALUES = {"nan": math.nan, "inf": math.inf}
# Integer types of the same width, in which a bit can be flipped.
_INTEGERS: Mapping[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Index of the sign bit. A flip in the upper bits of the exponent has the largest effect.
_SIGN = {torch.float16: 15, torch.bfloat16: 15, torch.float32: 31, torch.float64: 63}
_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class NanInjection(PlaceFault):
    """Fault that writes one NaN or infinity.

    In "weight" and "optimizer_state" the value persists. Skipped updates do not remove it; a rollback to a
    snapshot does. Optimizer state does not affect the gradients of its step, so the next step is the first to
    show it.

    Attributes:
        target: "loss", "activation", "gradient", "weight", "optimizer_state" or "batch". All except "loss"
            accept a colon and a pattern; see PlaceFault.
        kind: "nan" or "inf".
    """

    name: ClassVar[str] = "nan_injection"
    places: ClassVar[tuple[str, ...]] = (
        "loss",
        "activation",
        "gradient",
        "weight",
        "optimizer_state",
        "batch",
    )

    kind: str = "nan"

    def __post_init__(self) -> None:
        check_choice(f"{self.name}: kind", self.kind, _VALUES)
        super().__post_init__()

    def on_loss(self, loss: Tensor, acted: Acted) -> Tensor:  # noqa: D102
        if self.target != "loss":
            return loss
        acted()
        return loss * _VALUES[self.kind]

    def changed(self, tensor: Tensor) -> Tensor:  # noqa: D102
        mask = torch.zeros_like(tensor, dtype=torch.bool)
        mask[place_of(mask.shape, self.seed)] = True
        return tensor.masked_fill(mask, _VALUES[self.kind])


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

"""NanInjection: writes one NaN or infinity into any tensor of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from stackwise.stability.faults.fault import Acted
from stackwise.stability.faults.place import PlaceFault, place_of
from stackwise.support.arguments import check_choice

__all__ = ["NanInjection"]

_VALUES = {"nan": math.nan, "inf": math.inf}


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

"""LossSpike: multiplies the loss of a step, and so its gradients, by a factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from stackwise.stability.faults.fault import Acted, Fault
from stackwise.stability.faults.place import breaks
from stackwise.support.arguments import check_number

__all__ = ["LossSpike"]


@dataclass(frozen=True)
class LossSpike(Fault):
    """Fault that multiplies the loss by `factor`.

    Attributes:
        factor: factor above 1.
    """

    name: ClassVar[str] = "loss_spike"
    told_by_history: ClassVar[bool] = True

    factor: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"{self.name}: factor", self.factor, "a finite number > 1", lambda factor: factor > 1)

    def on_loss(self, loss: Tensor, acted: Acted) -> Tensor:  # noqa: D102
        spike = loss * float(self.factor)
        if breaks(loss, spike):
            acted()
        return spike

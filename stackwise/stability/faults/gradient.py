"""Gradient faults: multiply all gradients, or the gradients of some parameters, by a factor."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import nn

from stackwise.stability.faults.fault import Acted, Anatomy, Fault, matching
from stackwise.stability.faults.place import breaks, local
from stackwise.support.arguments import check_number, require

__all__ = ["GradientExplosion", "GradientScale"]


@dataclass(frozen=True)
class GradientScale(Fault):
    """Fault that multiplies gradients by `factor`.

    Attributes:
        factor: positive factor other than 1.
        target: pattern of parameter names. All matches are scaled.
    """

    name: ClassVar[str] = "gradient_scale"
    told_by_history: ClassVar[bool] = True

    factor: float = 0.1
    target: str = "*"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_factor()
        sound = isinstance(self.target, str) and bool(self.target)
        require(sound, f"{self.name}: target", self.target, "a pattern of parameter names")

    def _check_factor(self) -> None:
        allowed = "a finite number > 0 other than 1"
        check_number(f"{self.name}: factor", self.factor, allowed, lambda factor: factor > 0 and factor != 1)

    def resolve(self, anatomy: Anatomy) -> Self:  # noqa: D102
        matching(self, "target", self.target, anatomy.parameters, "parameters with a gradient")
        return self

    @torch.no_grad()
    def on_gradients(self, model: nn.Module, acted: Acted) -> None:  # noqa: D102
        broken = False
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and fnmatch.fnmatch(name, self.target):
                mine = local(parameter.grad)
                scaled = mine * float(self.factor)
                # A sharded gradient may be zero on this rank and non-zero on another one.
                broken |= mine is not parameter.grad or breaks(mine, scaled)
                mine.copy_(scaled)
        if broken:
            acted()


@dataclass(frozen=True)
class GradientExplosion(GradientScale):
    """Fault that makes gradients larger: it multiplies them by `factor`.

    Attributes:
        factor: factor above 1.
        target: pattern of parameter names. All matches are scaled.
    """

    name: ClassVar[str] = "gradient_explosion"

    factor: float = 10.0

    def _check_factor(self) -> None:
        check_number(f"{self.name}: factor", self.factor, "a finite number > 1", lambda factor: factor > 1)

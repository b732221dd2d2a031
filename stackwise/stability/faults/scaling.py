"""Faults that scale gradients, the loss, or the table of an embedding."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from stackwise.stability.faults.fault import Acted, Anatomy, Fault, matching
from stackwise.stability.faults.place import breaks, local
from stackwise.support.arguments import check_number, require

__all__ = ["EmbeddingExplosion", "GradientExplosion", "GradientScale", "LossSpike"]


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


@dataclass(frozen=True)
class EmbeddingExplosion(Fault):
    """Fault that multiplies the table of an embedding by `factor` at each faulty step. The change persists.

    Attributes:
        factor: factor per step, above 1.
        target: pattern of names of `nn.Embedding` modules that a step calls. The first match is broken.
    """

    name: ClassVar[str] = "embedding_explosion"
    told_by_history: ClassVar[bool] = True

    factor: float = 10.0
    target: str = "*"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"{self.name}: factor", self.factor, "a finite number > 1", lambda factor: factor > 1)
        sound = isinstance(self.target, str) and bool(self.target)
        require(sound, f"{self.name}: target", self.target, "a pattern of module names")

    @property
    def damages(self) -> bool:  # noqa: D102
        return True

    def resolve(self, anatomy: Anatomy) -> Self:  # noqa: D102
        names = [n for n in anatomy.modules if issubclass(anatomy.types.get(n, nn.Module), nn.Embedding)]
        return replace(self, target=matching(self, "target", self.target, names, "embeddings called")[0])

    @torch.no_grad()
    def before_step(  # noqa: D102
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,  # noqa: ARG002
        acted: Acted,
    ) -> None:
        table = model.get_parameter(f"{self.target}.weight")
        mine = local(table)
        scaled = mine * self.factor
        if mine is not table or breaks(mine, scaled):  # the other rows are on other ranks
            acted()
        mine.copy_(scaled)

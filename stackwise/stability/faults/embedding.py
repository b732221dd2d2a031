"""EmbeddingExplosion: makes the norm of an embedding grow from step to step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import nn

from stackwise.stability.faults.fault import Acted, Anatomy, Fault, matching
from stackwise.stability.faults.place import breaks, local
from stackwise.support.arguments import check_number, require

__all__ = ["EmbeddingExplosion"]


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

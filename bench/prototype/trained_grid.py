"""TrainedGrid: every configuration of a finite space, trained once, so that searches of it cost nothing.

Searches are compared over many repeats. Each would train much of what another one has trained, with the same
result; so all of the space is trained before, and a search looks up what a trial would have come to. What is
compared is what samplers choose; nothing of it is made up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from bench.prototype.part import Work
from bench.prototype.runs import digest
from stackwise import StackWiseConfig
from stackwise.prototype.search.evaluation import PrototypeEvaluation
from stackwise.prototype.search.score import ScoreWeights, score_config
from stackwise.prototype.search.search_result import hypervolume
from stackwise.prototype.search.space import Space
from stackwise.prototype.search.trial import TrialOutcome

__all__ = ["TrainedGrid", "key_of", "train_grid"]

Key = tuple[int, int, int, int, float]
Report = Callable[[float, float], None]


def key_of(config: StackWiseConfig) -> Key:
    """What of a configuration the space varies: width, heads, Blocks, d_ff and the learning rate."""
    model, depth = config.model, config.model.architecture
    n_blocks = depth.n_stacks * depth.blocks_per_stack
    return model.d_model, model.n_heads, n_blocks, model.d_ff, config.training.optimizer.lr


@dataclass(frozen=True)
class TrainedGrid:
    """What each configuration of a space came to. An `Evaluate` of a search, which looks it up.

    Attributes:
        outcomes: by `key_of`.
        weights: of the score.
    """

    outcomes: Mapping[Key, TrialOutcome]
    weights: ScoreWeights = field(default_factory=ScoreWeights)

    def __call__(
        self,
        config: StackWiseConfig,
        seed: int,  # noqa: ARG002
        report: Report,  # noqa: ARG002
    ) -> TrialOutcome:
        """The outcome of a configuration, whatever the seed."""
        return self.outcomes[key_of(config)]

    def score(self, outcome: Any) -> float:
        """Of an outcome or a trial, in nats; higher is better; -inf of what failed."""
        return score_config(outcome, weights=self.weights)

    @property
    def best_score(self) -> float:
        """Of all."""
        return max(map(self.score, self.outcomes.values()))

    def share_of_hypervolume(self, outcomes: Iterator[Any]) -> float:
        """Of loss and logarithm of tokens/s, from the worst success on: the part of it that they dominate."""
        everything = self._points(iter(self.outcomes.values()))
        reference = tuple(max(column) for column in zip(*everything, strict=True))
        return hypervolume(self._points(outcomes), reference) / hypervolume(everything, reference)

    def _points(self, outcomes: Iterator[Any]) -> list[tuple[float, float]]:
        return [
            (each.loss, -math.log2(each.tokens_per_second))
            for each in outcomes
            if each.status == "success" and each.tokens_per_second
        ]


def train_grid(work: Work, space: Space, steps: int) -> TrainedGrid | None:
    """Train all of a space; None: some of it is still missing."""
    configs: dict[str, StackWiseConfig] = {}
    for values in space.points():
        config = space.config(values)
        configs[f"grid; {digest(config.to_dict())}"] = config
    runs = {name: partial(_train, config, steps) for name, config in configs.items()}
    made = work.complete(runs, {"what": "grid", "steps": steps})
    if len(made) < len(runs):
        return None
    return TrainedGrid({key_of(configs[name]): TrialOutcome(**values) for name, values in made.items()})


def _train(config: StackWiseConfig, steps: int) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    outcome = PrototypeEvaluation(steps)(config, 0, lambda _part, _loss: None)
    yield vars(outcome)

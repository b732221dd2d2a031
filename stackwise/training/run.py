"""RackRun: our own trainer, one step at a time, as questions about a training step drive it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from stackwise.config import StackWiseConfig
from stackwise.device import resolve_device
from stackwise.model.build import create_rack_from_config
from stackwise.model.rack import Rack
from stackwise.training.data import create_data
from stackwise.training.objective import next_token_loss
from stackwise.training.precision import autocast
from stackwise.training.step import TrainStep

__all__ = ["RackRun"]


class RackRun:
    """A Rack of `config` in training, as `ArchitectureTrainer` trains it.

    Args:
        config: model and training.
        learning_rate: of a step, counted from 0.
        evaluate: (rack, batches) -> mean loss in nats.
    """

    def __init__(
        self,
        config: StackWiseConfig,
        learning_rate: Callable[[int], float],
        evaluate: Callable[[Rack, Iterable[Any]], float],
    ) -> None:
        self.config, self._learning_rate, self._evaluate = config, learning_rate, evaluate
        self.device = resolve_device(config.training.device)
        self._rack = create_rack_from_config(config).to(self.device).train()
        self.model: nn.Module = self._rack
        self._train_step = TrainStep(self._rack, config.training)
        self.optimizer: Any = self._train_step.optimizer
        self.number = 0

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One step at the learning rate of its number."""
        outcome = self._train_step(batch, self._learning_rate(self.number))
        self.number += 1
        return outcome.loss

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """What a step minimises."""
        with autocast(self.config.training.precision, self.device):
            return next_token_loss(self.model, batch)

    def evaluate(self, batches: Iterable[Mapping[str, Tensor]]) -> float:
        """Mean loss in nats of all targets, in eval mode."""
        return self._evaluate(self._rack, batches)

    def epoch(self, number: int) -> Iterator[Mapping[str, Tensor]]:
        """The training data of one pass."""
        training, _ = create_data(self.config)
        training.set_epoch(number)
        return iter(training)

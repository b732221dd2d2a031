"""RackRun: StackWise's own trainer, one step at a time, for checks of a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from stackwise.config import StackWiseConfig
from stackwise.data.create import create_data
from stackwise.model.build import create_rack_from_config
from stackwise.model.rack import Rack
from stackwise.support.device import resolve_device
from stackwise.training.objective import Objective
from stackwise.training.phase_model import PhaseModel
from stackwise.training.precision import autocast
from stackwise.training.step import MicroBatch, TrainStep
from stackwise.training.targets import Targets

__all__ = ["RackRun"]


class RackRun:
    """Training of a Rack of `config`, with the step of `ArchitectureTrainer`.

    Args:
        config: model and training configuration.
        learning_rate: maps a step, counted from 0, to its learning rate.
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
        self._objective = Objective(config.training.objective, config.model.vocab_size)
        self._phase = PhaseModel(self._rack, self._objective)
        self._train_step = TrainStep(self._phase, config.training, rack=self._rack)
        self.optimizer: Any = self._train_step.optimizer
        self.number = 0

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Train one step at the learning rate of its number, and return the loss."""
        return self._update([batch])

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss that a step minimises."""
        targets = self._targets(batch)
        with autocast(self.config.training.precision, self.device):
            total: Tensor = self._phase(targets)
        return total / targets.count.clamp(min=1)

    def accumulate(self, batches: Sequence[Mapping[str, Tensor]]) -> float:
        """Train one step on several micro-batches, and return the loss."""
        return float(self._update(batches))

    def evaluate(self, batches: Iterable[Mapping[str, Tensor]]) -> float:
        """Return the mean loss in nats of all targets, in eval mode."""
        return self._evaluate(self._rack, batches)

    def epoch(self, number: int) -> Iterator[Mapping[str, Tensor]]:
        """Return an iterator over the training data of one epoch."""
        training, _ = create_data(self.config)
        training.set_epoch(number)
        return iter(training)

    def _update(self, batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        micro = [MicroBatch(self._targets(batch, place)) for place, batch in enumerate(batches)]
        outcome = self._train_step(micro, self._learning_rate(self.number))
        self.number += 1
        return outcome.loss

    def _targets(self, batch: Mapping[str, Tensor], place: int = 0) -> Targets:
        noise = (self.config.training.seed, self.number, place)
        return self._objective.targets(batch, noise).sent(self.device)

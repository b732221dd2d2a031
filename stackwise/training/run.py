"""RackRun: our own trainer, one step at a time, as questions about a training step drive it."""

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
        self._objective = Objective(config.training.objective, config.model.vocab_size)
        self._phase = PhaseModel(self._rack, self._objective)
        self._train_step = TrainStep(self._phase, config.training, rack=self._rack)
        self.optimizer: Any = self._train_step.optimizer
        self.number = 0

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One step at the learning rate of its number."""
        return self._update([batch])

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """What a step minimises."""
        targets = self._targets(batch)
        with autocast(self.config.training.precision, self.device):
            total: Tensor = self._phase(targets)
        return total / targets.count.clamp(min=1)

    def accumulate(self, batches: Sequence[Mapping[str, Tensor]]) -> float:
        """One step from several micro-batches."""
        return float(self._update(batches))

    def evaluate(self, batches: Iterable[Mapping[str, Tensor]]) -> float:
        """Mean loss in nats of all targets, in eval mode."""
        return self._evaluate(self._rack, batches)

    def epoch(self, number: int) -> Iterator[Mapping[str, Tensor]]:
        """The training data of one pass."""
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

"""Evaluation: the mean loss of batches that nothing is learned from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor

from stackwise.config import TrainingConfig
from stackwise.support.dataloader import own_generators, set_loader_epoch
from stackwise.support.random_state import seeded
from stackwise.training.batch_stream import Batch, as_mapping
from stackwise.training.objective import Objective
from stackwise.training.precision import autocast, frozen_precision
from stackwise.training.processes import Processes
from stackwise.training.targets import IGNORED, Targets

__all__ = ["Evaluation", "ValidationRecord"]


@dataclass(frozen=True)
class ValidationRecord:
    """The loss of validation batches after some steps.

    Attributes:
        steps: that were trained, of all phases.
        loss: mean over all that is predicted, in nats, without z-loss.
        unit: what trained last, which with the Blocks before it is what was evaluated; None: not said.
    """

    steps: int
    loss: float
    unit: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {key: value for key, value in asdict(self).items() if value is not None}


class Evaluation:
    """Means of what an objective asks for, over batches and processes.

    Each is of the first epoch of the batches, what a loader draws starts from the run's seed, or from that of
    its own generator, and what an objective masks depends on the place of the batch alone, so that two
    evaluations ask for the same. The random state of the process is neither used nor changed, and generators
    are put back: the training may draw from the same.

    Args:
        objective: the seed of what it masks is the run's.
        settings: `training` of a configuration.
        processes: each gives its part of the batches, or the same; every one has to call. One may have more
            of them than another.
        alone: whether each process computes by itself with "fsdp" as well.
    """

    def __init__(
        self,
        objective: Objective,
        settings: TrainingConfig,
        processes: Processes,
        *,
        alone: bool = False,
    ) -> None:
        plain = settings.objective.model_copy(update={"z_loss": 0.0})
        self.objective = Objective(plain, objective.vocab_size)
        self._settings, self._processes = settings, processes
        self._together = settings.distributed.strategy == "fsdp" and not alone

    @torch.no_grad()
    def mean_loss(
        self,
        total: Callable[[Targets], Tensor],
        batches: Iterable[Batch],
        *,
        limit: int | None = None,
        precision: str | None = None,
    ) -> float:
        """Mean loss in nats of one pass of `batches`; NaN where there is nothing to predict.

        Args:
            total: what the objective sums up over a batch, on the device of the processes.
            batches: from their first one on.
            limit: how many are taken; None: all.
            precision: to compute in; None: the settings', of weights that are float32.
        """
        device, seed = self._processes.device, self._processes.seed(self._settings.seed)
        precision = frozen_precision(self._settings.precision) if precision is None else precision
        set_loader_epoch(batches, 0)
        loss, count = torch.zeros(2, dtype=torch.float64, device=device)
        with seeded(seed, device), _from_their_seeds(own_generators(batches)):
            taken: Iterable[Batch | None] = islice(batches, limit)
            if self._together:
                taken = self._until_all_end(taken)
            for place, batch in enumerate(taken):
                if batch is None:
                    targets = _nothing().sent(device)
                else:
                    targets = self.objective.targets(as_mapping(batch), (seed, place)).sent(device)
                with autocast(precision, device):
                    loss += total(targets)
                count += targets.count
        loss, count = self._processes.sum(torch.stack((loss, count)))
        return float(loss / count)

    def _until_all_end(self, batches: Iterable[Batch | None]) -> Iterator[Batch | None]:
        """The batches, then None until those of all processes have ended."""
        for batch in chain(batches, repeat(None)):
            there = torch.tensor(float(batch is not None), device=self._processes.device)
            if not self._processes.sum(there).item():
                return
            yield batch


@contextmanager
def _from_their_seeds(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Meanwhile generators draw as they did at first; afterwards they go on from where they were."""
    before = [(generator, generator.get_state()) for generator in generators]
    try:
        for generator, _ in before:
            generator.manual_seed(generator.initial_seed())
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


def _nothing() -> Targets:
    """A token, and nothing to predict."""
    ids_BT = torch.zeros(1, 1, dtype=torch.int64)
    return Targets(ids_BT, torch.full_like(ids_BT, IGNORED), torch.zeros(()))

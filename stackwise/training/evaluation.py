"""Evaluation: mean loss of batches without training on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor

from stackwise.config import TrainingConfig
from stackwise.support.dataloader import generator_states, own_generators, set_loader_epoch
from stackwise.support.random_state import seeded
from stackwise.training.batch_stream import Batch, as_mapping
from stackwise.training.objective import Objective
from stackwise.training.precision import autocast, frozen_precision
from stackwise.training.processes import Processes
from stackwise.training.targets import IGNORED, Targets

__all__ = ["Evaluation", "ValidationRecord"]


@dataclass(frozen=True)
class ValidationRecord:
    """Loss of the validation batches after some steps.

    Attributes:
        steps: number of trained steps, over all phases.
        loss: mean over all predicted tokens, in nats, without z-loss.
        unit: unit that was trained last, and evaluated together with the Blocks before it; None: unknown.
    """

    steps: int
    loss: float
    unit: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not None, as plain values for JSON."""
        return {key: value for key, value in asdict(self).items() if value is not None}


class Evaluation:
    """Mean loss of an objective over batches and processes.

    Every evaluation uses the first epoch of the batches. The loader's random numbers start from the seed of
    the run, or from the seed of its own generator. Masks depend only on the index of the batch. So two
    evaluations use the same batches and masks. The random state of the process is neither used nor changed.
    Generators are restored, because the training may use the same ones.

    Args:
        objective: training objective. Masks use the seed of the run.
        settings: `training` section of a configuration.
        processes: processes that evaluate together. Each passes its share of the batches, or all of them; the
            numbers of batches may differ. Every process has to call.
        alone: True: each process computes its batches independently, also with "fsdp".
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
        """Return the mean loss in nats of one epoch of `batches`; NaN if there is nothing to predict.

        Args:
            total: returns the objective's sum over a batch, on the device of the processes.
            batches: iterated from the start.
            limit: maximum number of batches; None: all.
            precision: compute precision; None: the precision of `settings` for float32 weights.
        """
        device, seed = self._processes.device, self._processes.seed(self._settings.seed)
        precision = frozen_precision(self._settings.precision) if precision is None else precision
        set_loader_epoch(batches, 0)
        loss, count = torch.zeros(2, dtype=torch.float64, device=device)
        with seeded(seed, device), _from_their_seeds(batches):
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
        """Yield the batches, then None until the batches of all processes are exhausted."""
        for batch in chain(batches, repeat(None)):
            there = torch.tensor(float(batch is not None), device=self._processes.device)
            if not self._processes.sum(there).item():
                return
            yield batch


@contextmanager
def _from_their_seeds(batches: object) -> Iterator[None]:
    """Reset the loader's own generators to their initial seed in this context; restore them at the end."""
    generators, states = own_generators(batches), generator_states(batches)
    try:
        for generator in generators:
            generator.manual_seed(generator.initial_seed())
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _nothing() -> Targets:
    """Return targets of one token, without a prediction."""
    ids_BT = torch.zeros(1, 1, dtype=torch.int64)
    return Targets(ids_BT, torch.full_like(ids_BT, IGNORED), torch.zeros(()))

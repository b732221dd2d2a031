"""TrainerSubject: a training step under examination, made anew for each question."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from stackwise.checks.result import Examined
from stackwise.subject.trainer_spec import TrainerSpec, TrainingRun
from stackwise.support.random_state import seeded

__all__ = ["TrainerSubject"]


@dataclass(frozen=True)
class TrainerSubject(Examined):
    """A training step under examination: a spec, on a device, under a seed.

    Attributes:
        spec: the training step.
        device: where it runs.
        seed: of weights, batches and dropout.
    """

    spec: TrainerSpec
    device: torch.device
    seed: int = 0

    @property
    def name(self) -> str:
        """Of the training step."""
        return self.spec.name

    def run(self) -> TrainingRun:
        """A fresh run: the same weights each time."""
        return self.spec.create(self.device, self.seed)

    def batch(self, number: int = 0, *, batch_size: int | None = None, seq_len: int | None = None) -> Any:
        """Batch `number`, a function of it and the seed alone."""
        return self.spec.batch(batch_size, seq_len, device=self.device, seed=self.seed + 7919 * number)

    def has(self, run: TrainingRun, *capabilities: str) -> bool:
        """Whether the run has all of these optional attributes, and none is None."""
        return all(getattr(run, each, None) is not None for each in capabilities)

    def scales(self, run: TrainingRun) -> bool:
        """Whether the run has a gradient scaler that is switched on."""
        return self.has(run, "scaler") and "scale" in run.scaler.state_dict()  # type: ignore[attr-defined]

    def averages_batches(self, run: TrainingRun, method: str) -> bool:
        """Whether the run says that `method` weighs all batches the same, whatever they hold."""
        return method in getattr(run, "averages_batches", ())

    def is_frozen(self, name: str) -> bool:
        """Whether a parameter is declared not to train."""
        prefixes = self.spec.frozen or ()
        return any(name == prefix or name.startswith(prefix.rstrip(".") + ".") for prefix in prefixes)

    def fixed_randomness(self) -> AbstractContextManager[None]:
        """Inside, random choices start from the seed; outside, nothing is changed."""
        return self.under_seed(0)

    def under_seed(self, number: int) -> AbstractContextManager[None]:
        """As `fixed_randomness`, from another seed for each number."""
        return seeded(self.seed + 104729 * number, self.device)

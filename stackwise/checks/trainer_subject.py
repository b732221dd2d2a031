"""TrainerSubject: a training step under examination."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from stackwise.checks.result import Examined
from stackwise.subject.trainer_spec import TrainerSpec, TrainingRun
from stackwise.support.random_state import seeded

__all__ = ["TrainerSubject"]


@dataclass(frozen=True)
class TrainerSubject(Examined):
    """Training step under examination, with a device and a seed."""

    spec: TrainerSpec

    def run(self) -> TrainingRun:
        """Return a new run, always with the same weights."""
        return self.spec.create(self.device, self.seed)

    def batch(self, number: int = 0, *, batch_size: int | None = None, seq_len: int | None = None) -> Any:
        """Return batch `number`, which depends only on the number and the seed."""
        return self.spec.batch(batch_size, seq_len, device=self.device, seed=self.seed + 7919 * number)

    def has(self, run: TrainingRun, *capabilities: str) -> bool:
        """Return True if the run has all of these optional attributes, and none is None."""
        return all(getattr(run, each, None) is not None for each in capabilities)

    def scales(self, run: TrainingRun) -> bool:
        """Return True if the run has an enabled gradient scaler."""
        return self.has(run, "scaler") and "scale" in run.scaler.state_dict()  # type: ignore[attr-defined]

    def averages_batches(self, run: TrainingRun, method: str) -> bool:
        """Return True if the run declares that `method` gives each batch the same weight."""
        return method in getattr(run, "averages_batches", ())

    def is_frozen(self, name: str) -> bool:
        """Return True if a parameter is declared frozen."""
        prefixes = self.spec.frozen or ()
        return any(name == prefix or name.startswith(prefix.rstrip(".") + ".") for prefix in prefixes)

    def under_seed(self, number: int) -> AbstractContextManager[None]:
        """Return `fixed_randomness` with another seed for each number."""
        return seeded(self.seed + 104729 * number, self.device)

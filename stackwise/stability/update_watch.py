"""UpdateWatch: detects if a user-defined training step changed the weights."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from stackwise.stability.faults.subject import Subject
from stackwise.subject.trainer_spec import TrainingRun

__all__ = ["UpdateWatch"]


class UpdateWatch:
    """Context around one step. After it, `updated` is True if the update was made.

    An update is detected by changed weights, because an optimizer that skips a step on the device is called
    all the same. The host waits for the device.

    Args:
        run: run whose weights are compared.
        damages: True if a fault writes to the weights in this step. The optimizer must then have been called
            too.
    """

    def __init__(self, run: TrainingRun, damages: bool = False) -> None:
        self.updated = False
        self._run, self._damages = run, damages
        self._calls = 0

    def __enter__(self) -> Self:
        self._before = [p.detach().clone() for p in self._run.model.parameters()]
        subject = Subject.of(self._run)

        def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._calls += subject.owns(optimizer)

        self._handle = register_optimizer_step_post_hook(count)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
        parameters = zip(self._before, self._run.model.parameters(), strict=True)
        changed = not all(_same(before, after.detach()) for before, after in parameters)
        self.updated = changed and not (self._damages and not self._calls)
        self._before = []


def _same(a: Tensor, b: Tensor) -> bool:
    """Return True if all values are equal. NaN is equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())

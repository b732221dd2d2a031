"""Trainer adapters: what others call a trainer, as a run with model, optimizer and step(batch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stackwise.lightning_run import LightningRun, is_lightning_module
from stackwise.transformers_run import TransformersRun, is_transformers_trainer

__all__ = ["FunctionRun", "adapted"]

Batch = Any


def adapted(made: Any) -> tuple[Callable[[Any], Any], dict[str, Any]] | None:
    """How to drive `made`, which another library would: by what it can do, not by its name.

    Returns:
        (what makes a run of such an object, attributes of a TrainerSpec), or None: it is nothing known.

    Raises:
        TypeError: it is, but asks for something that cannot be driven from outside.
    """
    if is_lightning_module(made):
        return LightningRun, {
            "notes": "a Lightning module: its hooks without a trainer, whose clipping is not asked and whose "
            "random states are kept"
        }
    if is_transformers_trainer(made):
        max_norm = getattr(made.args, "max_grad_norm", None)
        max_norm = max_norm if max_norm and max_norm > 0 else None
        return TransformersRun, {
            "max_norm": max_norm,
            "notes": f"a transformers Trainer, its own step without callbacks; clips to {max_norm}",
        }
    return None


class FunctionRun:
    """A bare function that makes one step.

    Args:
        model: what is trained.
        optimizer: what updates it.
        function: (model, optimizer, batch) -> the loss before the step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        function: Callable[[nn.Module, torch.optim.Optimizer, Batch], Any],
    ) -> None:
        self.model, self.optimizer, self._function = model, optimizer, function

    def step(self, batch: Batch) -> Any:
        """One call of the function."""
        return self._function(self.model, self.optimizer, batch)

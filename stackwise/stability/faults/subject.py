"""Subjects of an injection: where in a training of any library a step, its batch and its loss pass by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stackwise.checkpoint.object_state import unwrapped
from stackwise.subject.lightning_run import is_lightning_module
from stackwise.subject.trainer_adapter import JoinedOptimizers
from stackwise.subject.trainer_spec import TrainingRun
from stackwise.subject.transformers_run import is_transformers_trainer

__all__ = ["IN_PLACE", "Subject", "is_compiled"]

# What torch.compile puts around a module, and what module.compile() puts into one.
_COMPILED, IN_PLACE = "_orig_mod", "_compiled_call_impl"


@dataclass(frozen=True)
class Subject:
    """What is broken.

    Attributes:
        called: the module that the training calls.
        model: the same without what compiling and data parallelism put around it; its names are meant.
        optimizer: None: not known yet; it is seen at its first update.
        run: whose `step(batch)` is one update; None: updates are seen at the optimizer.
        trainer: a `transformers.Trainer`, or None.
        lightning: a Lightning module, or None.
    """

    called: nn.Module
    model: nn.Module
    optimizer: Any = None
    run: Any = None
    trainer: Any = None
    lightning: nn.Module | None = None

    @classmethod
    def of(cls, given: Any) -> Subject:
        """What of `given` can be broken, and where.

        Raises:
            TypeError: nothing known.
        """
        if is_transformers_trainer(given):
            return cls(given.model, unwrapped(given.model), trainer=given)
        if isinstance(given, nn.Module):
            return cls(given, unwrapped(given), lightning=given if is_lightning_module(given) else None)
        if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], nn.Module):
            model, optimizer = given
            if callable(getattr(optimizer, "step", None)):
                return cls(model, unwrapped(model), _inner_optimizer(optimizer))
        if isinstance(given, TrainingRun) and isinstance(given.model, nn.Module):
            trainer = getattr(given, "trainer", None)
            return cls(
                given.model,
                unwrapped(given.model),
                _inner_optimizer(given.optimizer),
                run=given,
                trainer=trainer if is_transformers_trainer(trainer) else None,
                lightning=given.model if is_lightning_module(given.model) else None,
            )
        raise TypeError(
            f"broken: got {type(given).__name__}; wanted a module, (module, optimizer), a run of a "
            "TrainerSpec, a transformers.Trainer or a Lightning module"
        )

    @property
    def optimizers(self) -> list[Any]:
        """Optimizers that update the model, as far as they are known."""
        if isinstance(self.optimizer, JoinedOptimizers):
            return list(self.optimizer.members)
        return [] if self.optimizer is None else [self.optimizer]

    def owns(self, holder: Any) -> bool:
        """Whether an optimizer updates, or a module holds, what is broken."""
        if isinstance(holder, nn.Module):
            return any(module is self.model for module in holder.modules())
        mine = {id(p) for p in self.model.parameters()}
        groups = getattr(holder, "param_groups", ())
        return holder is self.optimizer or any(id(p) in mine for group in groups for p in group["params"])


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of it is."""
    return any(hasattr(m, _COMPILED) or getattr(m, IN_PLACE, None) is not None for m in model.modules())


def _inner_optimizer(optimizer: Any) -> Any:
    """Of a wrapper, such as accelerate's or Lightning's, what it wraps: torch tells of its updates."""
    for name in ("optimizer", "_optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer):
            return inner
    return optimizer

"""Subject: model, optimizer and trainer of a training of any library, into which faults are injected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checkpoint.object_state import unwrapped
from stackwise.subject.lightning_run import is_lightning_module
from stackwise.subject.trainer_adapter import JoinedOptimizers
from stackwise.subject.trainer_spec import TrainingRun
from stackwise.subject.transformers_run import is_transformers_trainer

__all__ = ["IN_PLACE", "Subject", "is_compiled"]

# Attributes of compiled modules: torch.compile wraps a module, and module.compile() changes it in place.
_COMPILED, IN_PLACE = "_orig_mod", "_compiled_call_impl"


@dataclass(frozen=True)
class Subject:
    """Training that is broken by faults.

    Attributes:
        called: module that the training calls.
        model: the same module without the wrappers of compilation and data parallelism. Targets use its
            names.
        optimizer: optimizer of the model. None: not known until its first update.
        run: training run with a method `step(batch)` that makes one update. None: updates are observed at the
            optimizer.
        trainer: `transformers.Trainer`, or None.
        lightning: Lightning module, or None.
    """

    called: nn.Module
    model: nn.Module
    optimizer: Any = None
    run: Any = None
    trainer: Any = None
    lightning: nn.Module | None = None

    @classmethod
    def of(cls, given: Any) -> Subject:
        """Return the subject for an argument of `broken`.

        Raises:
            TypeError: `given` has an unsupported type.
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
        """Known optimizers that update the model."""
        if isinstance(self.optimizer, JoinedOptimizers):
            return list(self.optimizer.members)
        return [] if self.optimizer is None else [self.optimizer]

    def owns(self, holder: Any) -> bool:
        """Return True if `holder` is a module that contains the model, or an optimizer of its parameters."""
        if isinstance(holder, nn.Module):
            return any(module is self.model for module in holder.modules())
        mine = {id(p) for p in self.model.parameters()}
        groups = getattr(holder, "param_groups", ())
        return holder is self.optimizer or any(id(p) in mine for group in groups for p in group["params"])

    def is_trained_by(self, roots: Iterable[Tensor]) -> bool:
        """Return True if a backward pass from `roots` reaches a parameter. True if parameters are sharded."""
        parameters = tuple(self.model.parameters())
        if any(hasattr(p, "_local_tensor") for p in parameters):
            return True  # the graph contains gathered copies of them
        wanted = {id(p) for p in parameters}
        roots = tuple(roots)
        if any(id(root) in wanted for root in roots):
            return True
        open_nodes: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
        known = set(open_nodes)
        while open_nodes:
            node = open_nodes.pop()
            if id(getattr(node, "variable", None)) in wanted:
                return True
            following = {each for each, _ in node.next_functions if each is not None} - known
            known |= following
            open_nodes += following
        return False


def is_compiled(model: nn.Module) -> bool:
    """Return True if the model or a part of it is compiled."""
    return any(hasattr(m, _COMPILED) or getattr(m, IN_PLACE, None) is not None for m in model.modules())


def _inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer in a wrapper, such as accelerate's or Lightning's. torch reports its updates.

    Any other optimizer is returned unchanged.
    """
    for name in ("optimizer", "_optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer):
            return inner
    return optimizer

"""Trainer adapters: adapters for trainers, step functions and several optimizers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stackwise.subject.lightning_run import LightningRun, is_lightning_module
from stackwise.subject.transformers_run import TransformersRun, is_transformers_trainer
from stackwise.support.optimizer_state import optimizers_in

__all__ = [
    "FunctionRun",
    "JoinedOptimizers",
    "JoinedRun",
    "adapted",
    "members_of",
    "schedulers_of",
    "with_one_optimizer",
]

Batch = Any


def adapted(made: Any) -> tuple[Callable[[Any], Any], dict[str, Any]] | None:
    """Return the adapter for a third-party trainer, which is recognised by its methods.

    Returns:
        (function from such an object to a run, attributes of a TrainerSpec), or None if `made` is no known
        trainer.

    Raises:
        TypeError: it is one, but needs something that cannot be run from outside.
    """
    if is_lightning_module(made):
        return LightningRun, {
            "notes": "a Lightning module: its hooks run without a Trainer; clipping by the Trainer is not "
            "checked; random states are saved"
        }
    if is_transformers_trainer(made):
        max_norm = getattr(made.args, "max_grad_norm", None)
        max_norm = max_norm if max_norm and max_norm > 0 else None
        return TransformersRun, {
            "max_norm": max_norm,
            "notes": f"a transformers Trainer, its own step without callbacks; clips to {max_norm}",
        }
    return None


@dataclass(eq=False)
class FunctionRun:
    """Run of a function for one training step.

    Attributes:
        model: model to train.
        optimizer: its optimizer.
        function: (model, optimizer, batch) -> the loss before the step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    function: Callable[[nn.Module, torch.optim.Optimizer, Batch], Any]

    def step(self, batch: Batch) -> Any:
        """Call the function."""
        return self.function(self.model, self.optimizer, batch)


def with_one_optimizer(run: Any, name: str) -> Any:
    """Return the run, or a view of it that has one optimizer instead of several.

    Raises:
        TypeError: the run has no optimizer.
    """
    found = members_of(run.optimizer)
    if not found:
        got = f"trainer: {name}: optimizer: got {type(run.optimizer).__name__}"
        raise TypeError(
            f"{got}; allowed: a torch.optim.Optimizer, a list, tuple or dict of them, or an object with "
            "attributes that are one of these"
        )
    return run if len(found) == 1 and found[0] is run.optimizer else JoinedRun(run)


def members_of(given: Any) -> list[torch.optim.Optimizer]:
    """Return the outermost optimizers with step hooks in an object.

    Args:
        given: an optimizer, a list, tuple or dict of them, or an object that `optimizers_in` searches.
    """
    members: list[torch.optim.Optimizer] = []
    inner: set[int] = set()
    for each in reversed(optimizers_in(given)):
        # A wrapper of accelerate has no hooks, and those of pytorch_optimizer have a dict that torch refuses.
        if id(each) not in inner and isinstance(
            getattr(each, "_optimizer_step_pre_hooks", None), OrderedDict
        ):
            members.append(each)
            inner |= set(map(id, optimizers_in(each)))
    return members


def schedulers_of(run: Any) -> dict[str, Any]:
    """Return the schedulers of a run by name. `run.scheduler` may be a list, tuple or dict of them."""
    given = getattr(run, "scheduler", None)
    if given is None:
        return {}
    if isinstance(given, list | tuple):
        given = dict(enumerate(given))
    if isinstance(given, dict):
        return {f"scheduler.{name}": each for name, each in given.items() if each is not None}
    return {"scheduler": given}


class JoinedOptimizers:
    """Read-only view of several optimizers as one.

    Args:
        members: the optimizers, in the order of the container that holds them.
    """

    def __init__(self, members: list[torch.optim.Optimizer]) -> None:
        self.members = members

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers, not copies."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """State of all optimizers, by parameter."""
        return {key: value for member in self.members for key, value in member.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return one state dict in which the parameters of all optimizers are numbered consecutively."""
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for member in self.members:
            saved, first = member.state_dict(), sum(len(group["params"]) for group in groups)
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            renamed = {number: first + place for place, number in enumerate(numbers)}
            state |= {renamed.get(number, number): value for number, value in saved["state"].items()}
            groups += [
                {**group, "params": [renamed[number] for number in group["params"]]}
                for group in saved["param_groups"]
            ]
        return {"state": state, "param_groups": groups}


class JoinedRun:
    """Run with several optimizers, which the checks see as a run with one.

    Args:
        run: its `optimizer` is a list, tuple or dict of optimizers, or an object that holds them.
    """

    def __init__(self, run: Any) -> None:
        self.run = run

    @property
    def model(self) -> nn.Module:
        """Model of the run."""
        return self.run.model  # type: ignore[no-any-return]

    @property
    def optimizer(self) -> JoinedOptimizers:
        """View of the current optimizers of the run."""
        return JoinedOptimizers(members_of(self.run.optimizer))

    def step(self, batch: Batch) -> Any:
        """Make one step of the run and return its loss."""
        return self.run.step(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run, name)

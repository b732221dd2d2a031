"""Fault: base class of all faults, which break a training step on purpose at chosen steps.

Before a fault acts, its target is resolved against the modules and parameters that the model uses in a step,
so the target is known to exist. The fault calls `acted` each time it acts.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from stackwise.stability.faults.tensors import first_tensor
from stackwise.support import optimizer_state
from stackwise.support.arguments import check_sizes
from stackwise.support.hooks import temporary_hooks

__all__ = ["Acted", "Anatomy", "Fault"]

Acted = Callable[[], None]
Batch = Any

_SHOWN = 6


@dataclass(frozen=True)
class Anatomy:
    """Modules, parameters and optimizer state that a training step of a model uses.

    Attributes:
        modules: names of the called modules that return tensors, in the model's order.
        leaves: names of the modules in `modules` without children.
        parameters: names of the parameters that receive a gradient, in the model's order.
        types: maps the name of each module to its type.
        states: names of the optimizer's state tensors, "PARAMETER.KEY". None: not known yet.
    """

    modules: tuple[str, ...]
    leaves: tuple[str, ...]
    parameters: tuple[str, ...]
    types: Mapping[str, type[nn.Module]] = field(default_factory=dict)
    states: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        step: Callable[[], object],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Anatomy:
        """Return the anatomy of one training step.

        Args:
            model: model of the step.
            step: runs the model forward and backward.
            optimizer: makes an update after `step`, so that its state exists. None: `states` is None.
        """
        with watched(model) as called:
            step()
        anatomy = cls.seen(model, called, {n for n, p in model.named_parameters() if p.grad is not None})
        if optimizer is None:
            return anatomy
        optimizer.step()
        return replace(anatomy, states=tuple(states_of(model, optimizer)))

    @classmethod
    def seen(cls, model: nn.Module, called: set[str], with_gradient: set[str]) -> Anatomy:
        """Return the anatomy from the names of the modules and parameters that a step has used."""
        names = [name for name, _ in model.named_modules() if name in called]
        parameters = (name for name, _ in model.named_parameters() if name in with_gradient)
        return cls._sorted(model, names, tuple(parameters))

    @classmethod
    def possible(cls, model: nn.Module) -> Anatomy:
        """Return every module and parameter that a step might use. No step is needed."""
        never = {
            f"{name}.out_proj".removeprefix(".")
            for name, module in model.named_modules()
            if isinstance(module, nn.MultiheadAttention)  # its projection is read, not called
        }
        names = [
            name
            for name, module in model.named_modules()
            if name and name not in never and type(module).forward is not _NOT_CALLED
        ]
        return cls._sorted(model, names, tuple(n for n, p in model.named_parameters() if p.requires_grad))

    @classmethod
    def _sorted(cls, model: nn.Module, names: Sequence[str], parameters: tuple[str, ...]) -> Anatomy:
        leaves = tuple(n for n in names if not any(True for _ in model.get_submodule(n).children()))
        types = {name: type(model.get_submodule(name)) for name in names}
        return cls(tuple(names), leaves, parameters, types)


# The forward method of a module that defines none, such as a ModuleList.
_NOT_CALLED = nn.Module.forward


@contextmanager
def watched(model: nn.Module) -> Iterator[set[str]]:
    """Collect the names of called modules that return tensors in the block. The root module is excluded."""
    called: set[str] = set()

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _module, _args, output: called.add(name) if first_tensor(output) is not None else None

    names = [name for name, _ in model.named_modules() if name]
    with temporary_hooks(model.get_submodule(name).register_forward_hook(watch(name)) for name in names):
        yield called


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state of each parameter, without step numbers, as "PARAMETER.KEY".

    The optimizers inside a container are included.
    """
    found = optimizer_state.states_of(optimizer)
    held = {id(key): state for _, key, state in found if isinstance(state, Mapping)}
    return {
        f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in held.get(id(parameter), {}).items()
        if isinstance(value, Tensor) and value.is_floating_point() and key != "step" and value.numel()
    }


def matching(fault: Fault, key: str, pattern: str, names: Sequence[str], noun: str) -> list[str]:
    """Return the elements of `names` that match.

    Raises:
        ValueError: no element matches. The message shows some of the names.
    """
    found = fnmatch.filter(names, pattern)
    if not found:
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        raise ValueError(
            f"{fault.name}: {key}: got {getattr(fault, key)!r}, which matches nothing; "
            f"{noun}: {shown or 'none'}"
        )
    return found


def called_module(fault: Fault, target: str | None, anatomy: Anatomy) -> str:
    """Return the first called module that matches. None: middle one of the modules without children.

    Raises:
        ValueError: no module matches.
    """
    if target is None and anatomy.leaves:
        return anatomy.leaves[len(anatomy.leaves) // 2]
    return matching(fault, "target", target or "*", anatomy.modules, "modules called")[0]


@dataclass(frozen=True)
class Fault:
    """Base class of all faults. A subclass overrides the hooks below in which it acts.

    Attributes:
        step: first faulty step, counted from 0.
        duration: number of consecutive faulty steps.
    """

    name: ClassVar[str]
    # Target other than model, batch, loss and gradients: "loader", "ranks", "process" or "storage".
    breaks: ClassVar[str] = ""
    # True if a faulty step differs from a healthy one only by its norms relative to earlier steps.
    told_by_history: ClassVar[bool] = False
    # True if the fault raises an error, so that the training continues with a new step.
    raises: ClassVar[bool] = False

    step: int
    duration: int = 1

    def __post_init__(self) -> None:
        check_sizes(0, **{f"{self.name}: step": self.step})
        check_sizes(1, **{f"{self.name}: duration": self.duration})

    def __str__(self) -> str:
        given = (
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default
        )
        return f"{self.name}({', '.join(given)})"

    @property
    def steps(self) -> range:
        """Steps at which the fault acts."""
        return range(self.step, self.step + self.duration)

    @property
    def here(self) -> bool:
        """True if the fault acts in this process."""
        return True

    @property
    def damages(self) -> bool:
        """True if the fault writes into weights or optimizer state, which stay changed after it."""
        return False

    def at(self, step: int) -> Self:
        """Return the fault for one of its steps. It differs from step to step if it grows or is random."""
        assert step in self.steps
        return self

    def resolve(self, anatomy: Anatomy) -> Self:  # noqa: ARG002
        """Return the fault with its target as a full name.

        Raise ValueError if the model has no such target.
        """
        return self

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, acted: Acted) -> None:  # noqa: ARG002
        """Break model or optimizer before the forward pass. `optimizer` is None until it is known."""
        self.on_start(acted)

    def on_start(self, acted: Acted) -> None:
        """Break something other than model and optimizer when the step begins."""

    def on_batch(self, batch: Batch, acted: Acted) -> Batch:  # noqa: ARG002
        """Return a broken copy of a batch. The batch itself is not changed."""
        return batch

    def around_forward(self, model: nn.Module, acted: Acted) -> AbstractContextManager[None]:  # noqa: ARG002
        """Break the forward pass that runs in the block."""
        return nullcontext()

    def on_loss(self, loss: Tensor, acted: Acted) -> Tensor:  # noqa: ARG002
        """Return a broken loss, before its backward pass."""
        return loss

    def on_gradients(self, model: nn.Module, acted: Acted) -> None:
        """Break the gradients before the update."""

    def on_loader(self, batches: Iterator[Any], acted: Acted) -> None:
        """Break a data loader before a batch is drawn from its iterator, `batches`."""

    def around_saves(self, acted: Acted) -> AbstractContextManager[None]:  # noqa: ARG002
        """Break the files that are written in the block, which lasts until the next step begins."""
        return nullcontext()

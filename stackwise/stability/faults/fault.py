"""Fault: what can be broken on purpose in a training step, and when.

Before it acts, a fault is resolved against what the model really does in a step, so that its target is known
to exist; each time it acts, it says so.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from stackwise.stability.faults.output import first_tensor
from stackwise.support import optimizer_state
from stackwise.support.arguments import check_sizes

__all__ = ["Acted", "Anatomy", "Fault"]

Acted = Callable[[], None]
Batch = Any

_SHOWN = 6


@dataclass(frozen=True)
class Anatomy:
    """What a training step of a model touches.

    Attributes:
        modules: names of the modules that are called and return tensors, in the model's order.
        leaves: those of them without children.
        parameters: names of the parameters that get a gradient, in the model's order.
        types: of the modules, by name.
        states: names of what the optimizer keeps, "PARAMETER.KEY"; None: not known yet.
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
        """Watch `step`, which runs the model forward and backward, and then an update by `optimizer`."""
        with watched(model) as called:
            step()
        anatomy = cls.seen(model, called, {n for n, p in model.named_parameters() if p.grad is not None})
        if optimizer is None:
            return anatomy
        optimizer.step()
        return replace(anatomy, states=tuple(states_of(model, optimizer)))

    @classmethod
    def seen(cls, model: nn.Module, called: set[str], with_gradient: set[str]) -> Anatomy:
        """After a step, from the names of modules and parameters that it touched."""
        names = [name for name, _ in model.named_modules() if name in called]
        parameters = (name for name, _ in model.named_parameters() if name in with_gradient)
        return cls._sorted(model, names, tuple(parameters))

    @classmethod
    def possible(cls, model: nn.Module) -> Anatomy:
        """Before any step: all that one might touch."""
        never = {
            f"{name}.out_proj".removeprefix(".")
            for name, module in model.named_modules()
            if isinstance(module, nn.MultiheadAttention)  # whose projection is read, not called
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


# What a module has that defines no forward pass, such as a ModuleList.
_NOT_CALLED = nn.Module.forward


@contextmanager
def watched(model: nn.Module) -> Iterator[set[str]]:
    """Inside, the names of the modules that are called and return tensors are gathered; the root has none."""
    called: set[str] = set()

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _module, _args, output: called.add(name) if first_tensor(output) is not None else None

    names = [name for name, _ in model.named_modules() if name]
    handles = [model.get_submodule(name).register_forward_hook(watch(name)) for name in names]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


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
    """Those of `names` that match.

    Raises:
        ValueError: none does; some are shown.
    """
    found = fnmatch.filter(names, pattern)
    if not found:
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        raise ValueError(
            f"{fault.name}: {key}: got {getattr(fault, key)!r}, which matches nothing; "
            f"{noun}: {shown or 'none'}"
        )
    return found


@dataclass(frozen=True)
class Fault:
    """Base of all faults. A fault overrides those of the hooks below that it acts in.

    Attributes:
        step: the first step that is broken, counted from 0.
        duration: how many steps are.
    """

    name: ClassVar[str]
    # What it breaks beside model, batch, loss and gradients: "loader", "ranks", "process" or "storage".
    breaks: ClassVar[str] = ""
    # Whether nothing but the norms of the steps before tells a broken step from a sound one.
    told_by_history: ClassVar[bool] = False
    # Whether it raises, so that what a training does next is another step.
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
        """The steps at which the fault acts."""
        return range(self.step, self.step + self.duration)

    @property
    def here(self) -> bool:
        """Whether it is for this process to act."""
        return True

    @property
    def damages(self) -> bool:
        """Whether it writes into weights or optimizer state, which stay as they are when it is over."""
        return False

    def at(self, step: int) -> Self:
        """The fault as it is at one of its steps: another each time where it grows or chooses by chance."""
        assert step in self.steps
        return self

    def resolve(self, anatomy: Anatomy) -> Self:  # noqa: ARG002
        """The fault with its target spelled out; ValueError where the model has no such place."""
        return self

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, acted: Acted) -> None:  # noqa: ARG002
        """Break what is there before the forward pass; `optimizer` is None until it is known."""
        self.on_start(acted)

    def on_start(self, acted: Acted) -> None:
        """Break what is beside model and optimizer as the step begins."""

    def on_batch(self, batch: Batch, acted: Acted) -> Batch:  # noqa: ARG002
        """Break a batch, which is not changed itself."""
        return batch

    def around_forward(self, model: nn.Module, acted: Acted) -> AbstractContextManager[None]:  # noqa: ARG002
        """Break the forward pass that runs inside."""
        return nullcontext()

    def on_loss(self, loss: Tensor, acted: Acted) -> Tensor:  # noqa: ARG002
        """Break the loss before its backward pass."""
        return loss

    def on_gradients(self, model: nn.Module, acted: Acted) -> None:
        """Break the gradients before the update."""

    def on_loader(self, batches: Iterator[Any], acted: Acted) -> None:
        """Break a data loader before a batch is drawn from `batches`, its iterator."""

    def around_saves(self, acted: Acted) -> AbstractContextManager[None]:  # noqa: ARG002
        """Break what is written inside, which is from the beginning of a step to that of the next."""
        return nullcontext()

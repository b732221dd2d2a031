"""Faults: what can be broken on purpose in a training step, when and where.

Before a run each fault is resolved against what the model really does in a step, so that its target is
known to exist; during it, each one says when it did act.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from stackwise.argument import check_choice, check_number, check_sizes, require

__all__ = ["Acted", "Anatomy", "Fault", "GradientExplosion", "NanInjection"]

Acted = Callable[[], None]
_VALUES = {"nan": math.nan, "inf": math.inf}


@dataclass(frozen=True)
class Anatomy:
    """What a training step of a model touches.

    Attributes:
        modules: names of the modules that are called and return tensors, in the model's order.
        leaves: those of them without children.
        parameters: names of the parameters that get a gradient, in the model's order.
    """

    modules: tuple[str, ...]
    leaves: tuple[str, ...]
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, step: Callable[[], object]) -> Anatomy:
        """Watch `step`, which runs the model forward and backward."""
        called: set[str] = set()

        def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
            return lambda _module, _args, output: (
                called.add(name) if _first_tensor(output) is not None else None
            )

        names = [name for name, _ in model.named_modules() if name]
        handles = [model.get_submodule(name).register_forward_hook(watch(name)) for name in names]
        try:
            step()
        finally:
            for handle in handles:
                handle.remove()
        modules = tuple(name for name in names if name in called)
        leaves = tuple(n for n in modules if not any(True for _ in model.get_submodule(n).children()))
        return cls(modules, leaves, tuple(n for n, p in model.named_parameters() if p.grad is not None))


@dataclass(frozen=True)
class Fault:
    """Base of all faults.

    Attributes:
        step: the first step that is broken, counted from 0.
        duration: how many steps are.
    """

    name: ClassVar[str]
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

    def resolve(self, anatomy: Anatomy) -> Self:  # noqa: ARG002
        """The fault with its target spelled out; ValueError where the model has no such place."""
        return self

    def around_forward(self, model: nn.Module, acted: Acted) -> AbstractContextManager[None]:  # noqa: ARG002
        """Break the forward pass that runs inside."""
        return nullcontext()

    def on_loss(self, loss: Tensor, acted: Acted) -> Tensor:  # noqa: ARG002
        """Break the loss before its backward pass."""
        return loss

    def on_gradients(self, model: nn.Module, acted: Acted) -> None:
        """Break the gradients before the update."""


@dataclass(frozen=True)
class NanInjection(Fault):
    """Writes one NaN or infinity.

    Attributes:
        target: "loss", "activation" or "gradient", the latter two optionally with a pattern after a
            colon: of module names ("activation:stacks.0.*.attention") or of parameter names
            ("gradient:*.embedding.weight"). Only modules that a step calls, and parameters that get a
            gradient, are meant; the first match is broken. Without a pattern it is the middle one of
            the called modules without children, or of those parameters.
        kind: "nan" or "inf".
    """

    name: ClassVar[str] = "nan_injection"
    target: str = "activation"
    kind: str = "nan"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{self.name}: kind", self.kind, _VALUES)
        sound = isinstance(self.target, str) and re.fullmatch(
            r"loss|(activation|gradient)(:.+)?", self.target
        )
        allowed = "'loss', 'activation[:PATTERN]' or 'gradient[:PATTERN]'"
        require(bool(sound), f"{self.name}: target", self.target, allowed)

    def resolve(self, anatomy: Anatomy) -> Self:  # noqa: D102
        place, _, pattern = self.target.partition(":")
        if place == "loss":
            return self
        names = anatomy.modules if place == "activation" else anatomy.parameters
        if pattern:
            matches = fnmatch.filter(names, pattern)
        else:
            default = anatomy.leaves if place == "activation" else names
            matches = list(default[len(default) // 2 :])
        if not matches:
            shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            kind = "modules called" if place == "activation" else "parameters with a gradient"
            raise ValueError(
                f"{self.name}: target: got {self.target!r}, which matches nothing; {kind}: {shown or 'none'}"
            )
        return replace(self, target=f"{place}:{matches[0]}")

    @contextmanager
    def around_forward(self, model: nn.Module, acted: Acted) -> Iterator[None]:  # noqa: D102
        place, _, name = self.target.partition(":")
        if place != "activation":
            yield
            return

        def poison(_module: nn.Module, _args: Any, output: Any) -> Any:
            acted()
            return self._poison(output)

        # First among the module's hooks, so that whatever watches the module sees the broken output.
        handle = model.get_submodule(name).register_forward_hook(poison, prepend=True)
        try:
            yield
        finally:
            handle.remove()

    def on_loss(self, loss: Tensor, acted: Acted) -> Tensor:  # noqa: D102
        if self.target != "loss":
            return loss
        acted()
        return loss * _VALUES[self.kind]

    @torch.no_grad()
    def on_gradients(self, model: nn.Module, acted: Acted) -> None:  # noqa: D102
        place, _, name = self.target.partition(":")
        if place == "gradient":
            gradient = model.get_parameter(name).grad
            if gradient is not None:
                acted()
                gradient[(0,) * gradient.ndim] = _VALUES[self.kind]

    def _poison(self, output: Any) -> Any:
        """The output with one element of its first floating-point tensor replaced."""
        if isinstance(output, tuple):
            return (self._poison(output[0]), *output[1:])
        tensor = _first_tensor(output)
        assert tensor is not None
        mask = torch.zeros_like(tensor, dtype=torch.bool)
        mask[(0,) * mask.ndim] = True
        return tensor.masked_fill(mask, _VALUES[self.kind])


@dataclass(frozen=True)
class GradientExplosion(Fault):
    """Multiplies every gradient by `factor`.

    Attributes:
        factor: above 1.
    """

    name: ClassVar[str] = "gradient_explosion"
    factor: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(f"{self.name}: factor", self.factor, "a finite number > 1", lambda factor: factor > 1)

    @torch.no_grad()
    def on_gradients(self, model: nn.Module, acted: Acted) -> None:  # noqa: D102
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if gradients:
            acted()
            torch._foreach_mul_(gradients, float(self.factor))


def _first_tensor(output: Any) -> Tensor | None:
    """The floating-point tensor that can be broken in a module's output, or None."""
    if isinstance(output, tuple) and output:
        output = output[0]
    return output if isinstance(output, Tensor) and output.is_floating_point() and output.numel() else None

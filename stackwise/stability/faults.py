"""Faults: what can be broken on purpose in a training step, when and where.

A fault says at which steps it acts and verifies before the run that its target exists; the run
records the steps at which it did act.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stackwise.argument import check_choice, check_number, check_sizes, require

__all__ = ["Fault", "GradientExplosion", "NanInjection"]

_VALUES = {"nan": math.nan, "inf": math.inf}


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

    def prepare(self, model: nn.Module) -> None:
        """Check that there is something to break; ValueError where there is not."""

    def around_forward(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """Break the forward pass that runs inside."""
        return nullcontext()

    def on_loss(self, loss: Tensor) -> Tensor:
        """Break the loss before its backward pass."""
        return loss

    def on_gradients(self, model: nn.Module) -> None:
        """Break the gradients before the update."""


@dataclass(frozen=True)
class NanInjection(Fault):
    """Writes one NaN or infinity.

    Attributes:
        target: "loss", "activation" or "gradient", the latter two optionally with a pattern after a
            colon: of module names ("activation:stacks.0.*.attention") or of parameter names
            ("gradient:*.embedding.weight"). The first match in the model's order is broken; without
            a pattern, the middle one of all modules without children, or of all parameters.
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

    def prepare(self, model: nn.Module) -> None:  # noqa: D102
        if self.target != "loss":
            self._find(model)

    @contextmanager
    def around_forward(self, model: nn.Module) -> Iterator[None]:  # noqa: D102
        if not self.target.startswith("activation"):
            yield
            return
        module = model.get_submodule(self._find(model))
        # First among the module's hooks, so that whatever watches the module sees the broken output.
        handle = module.register_forward_hook(
            lambda _module, _args, output: self._poison(output), prepend=True
        )
        try:
            yield
        finally:
            handle.remove()

    def on_loss(self, loss: Tensor) -> Tensor:  # noqa: D102
        return loss * _VALUES[self.kind] if self.target == "loss" else loss

    @torch.no_grad()
    def on_gradients(self, model: nn.Module) -> None:  # noqa: D102
        if self.target.startswith("gradient"):
            gradient = model.get_parameter(self._find(model)).grad
            if gradient is None:
                raise ValueError(f"{self.name}: target: {self._find(model)} has no gradient to break")
            gradient[(0,) * gradient.ndim] = _VALUES[self.kind]

    def _find(self, model: nn.Module) -> str:
        place, _, pattern = self.target.partition(":")
        if place == "gradient":
            names = [name for name, p in model.named_parameters() if p.requires_grad]
            default = names
        else:
            names = [name for name, _ in model.named_modules() if name]
            default = [n for n in names if not any(True for _ in model.get_submodule(n).children())]
        matches = fnmatch.filter(names, pattern) if pattern else default[len(default) // 2 :]
        if not matches:
            raise ValueError(
                f"{self.name}: target: got {self.target!r}, which matches nothing; there are "
                f"{', '.join(names[:6]) or 'none'}{', ...' if len(names) > 6 else ''}"
            )
        return matches[0]

    def _poison(self, output: Any) -> Any:
        """The output with one element of its first floating-point tensor replaced."""
        if isinstance(output, Tensor) and output.is_floating_point():
            mask = torch.zeros_like(output, dtype=torch.bool)
            mask[(0,) * mask.ndim] = True
            return output.masked_fill(mask, _VALUES[self.kind])
        if isinstance(output, tuple) and output:
            return (self._poison(output[0]), *output[1:])
        raise ValueError(
            f"{self.name}: target: {self.target} returns {type(output).__name__}; no tensor to break"
        )


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
    def on_gradients(self, model: nn.Module) -> None:  # noqa: D102
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, float(self.factor))

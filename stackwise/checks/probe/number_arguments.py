"""Number arguments: numbers that `forward` gets besides the inputs, and other values of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import BoundArguments, signature
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.support.hooks import temporary_hooks

__all__ = ["number_arguments", "other_values", "with_argument"]

_STEP = re.compile(r"t|ts|(diffusion_?)?(time)?_?steps?|times?|sigmas?|noise_?levels?")
_HIDDEN = -10  # An additive mask hides a position by a number below this.


def number_arguments(model: nn.Module, call: Callable[[], object], inputs: Tensor) -> dict[str, Any]:
    """Return the numbers that a call of the model gets, by the name of the argument.

    These are floating-point numbers, and integers that are named like a time step. The inputs and masks are
    left out.
    """
    found: dict[str, Any] = {}

    def record(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        for name, value in _bound(module, args, kwargs).arguments.items():
            if _is_number(name, value) and not _is_same(value, inputs):
                found.setdefault(name, value)

    with temporary_hooks([model.register_forward_pre_hook(record, with_kwargs=True)]):
        call()
    return found


def other_values(value: Any) -> Iterator[Any]:
    """Yield values to pass in place of a number: usual ones, and ones beyond a limit or a threshold."""
    if isinstance(value, int) or (isinstance(value, Tensor) and not value.is_floating_point()):
        # A larger step might be outside of a table.
        yield from (value * 0, value // 2, value - 1)
        return
    yield from (value * 0.5 + 0.37, value * 0, -value, value * 0 + 1, value * 10 + 1, value * 1e-3)
    if isinstance(value, Tensor):  # an order of values is the same after all the changes above
        yield torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)


@contextmanager
def with_argument(model: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Replace an argument in each call of the model that gets it."""

    def change(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> tuple[object, dict[str, Any]]:
        bound = _bound(module, args, kwargs)
        if name in bound.arguments:
            bound.arguments[name] = value
        return bound.args, bound.kwargs

    with temporary_hooks([model.register_forward_pre_hook(change, with_kwargs=True)]):
        yield


def _bound(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> BoundArguments:
    return signature(module.forward).bind(*args, **kwargs)


def _is_number(name: str, value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
        return value.ndim < 2 or not bool(((value == 0) | (value == 1) | (value < _HIDDEN)).all())
    is_step = isinstance(value, int) or (isinstance(value, Tensor) and value.ndim < 2 and value.numel() > 0)
    return is_step and not isinstance(value, bool) and _STEP.fullmatch(name) is not None


def _is_same(value: object, inputs: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and value.shape == inputs.shape
        and bool(torch.equal(value.double(), inputs.double()))
    )

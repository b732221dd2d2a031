"""Dropout, switched off in models that are in train mode, and other random draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

__all__ = ["DropoutCalls", "EqualDraws", "WithoutDropout", "dropout_rate"]

# Largest difference between the share of dropped elements and the rate, in standard errors.
_STANDARD_ERRORS = 5.0

_DROPOUTS = {
    F.dropout,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    torch.dropout,
    torch.alpha_dropout,
    torch.feature_dropout,
    torch.feature_alpha_dropout,
}
# Index of the positional argument that is the probability.
_PROBABILITY: dict[Callable[..., Any], int] = {
    F.scaled_dot_product_attention: 4,
    F.multi_head_attention_forward: 10,
}
# The index depends on the overload. The probability is the only float.
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


class WithoutDropout(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Context in which the dropout of torch returns its input."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function with a dropout probability of 0."""
        kwargs = kwargs or {}
        if function in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if function is torch.Tensor.backward:
            with self:  # torch disables the mode inside the call, and recomputation calls the model there
                return _backward(*args, **kwargs)
        if function is torch.native_dropout:
            args, kwargs = (*args[:2], False), {key: each for key, each in kwargs.items() if key != "train"}
        elif (place := _PROBABILITY.get(function)) is not None:
            args = (*args[:place], *(0.0 for _ in args[place : place + 1]), *args[place + 1 :])
            kwargs |= {key: 0.0 for key in kwargs if key == "dropout_p"}
        elif function in _RECURRENT:
            args = tuple(0.0 if isinstance(value, float) else value for value in args)
        return function(*args, **kwargs)


def _backward(output: torch.Tensor, gradient: torch.Tensor | None = None, **options: Any) -> None:
    """Run the backward pass from a gradient edge. With a tensor, torch would call this mode again."""
    torch.autograd.backward(get_gradient_edge(output), gradient, **options)


class EqualDraws(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Context in which each uniform random number has the same value, and Bernoulli draws are 0 or 1.

    Args:
        value: at least 0, below 1. Bernoulli draws are 0 if it is below one half.

    Attributes:
        selects: True if exponential or multinomial numbers were drawn, as for the selection of experts.
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value, self.selects = value, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the result of a random draw."""
        result = function(*args, **(kwargs or {}))
        self.selects |= function in (torch.Tensor.exponential_, torch.Tensor.multinomial, torch.multinomial)
        if function in (torch.rand, torch.rand_like):
            return result.fill_(self.value)
        if function in (torch.bernoulli, torch.Tensor.bernoulli_, torch.Tensor.bernoulli):
            return result.fill_(round(self.value))
        return result


class DropoutCalls(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Context that records which modules of a model are called, and the dropout rates that they apply.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model, self._hooks = model, ExitStack()
        self._stack: list[str] = []
        self._called: set[str] = set()
        self._rates: set[tuple[str, float]] = set()

    def __enter__(self) -> DropoutCalls:
        for name, module in self._model.named_modules():
            self._hooks.enter_context(module.register_forward_pre_hook(partial(self._begin, name)))
            self._hooks.enter_context(module.register_forward_hook(self._end, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _DROPOUTS or function in _PROBABILITY:
            rates = [each for each in (*args, *kwargs.values()) if isinstance(each, float)]
            self._rates |= {(name, rate) for name in self._stack for rate in rates}
        return function(*args, **kwargs)

    def applies(self, name: str, rate: float) -> bool:
        """Return True if a dropout module is called, or the module that contains it applies its rate.

        Also return True if that module is not called at all.
        """
        owner = name.rpartition(".")[0]
        while owner and isinstance(self._model.get_submodule(owner), nn.ModuleList | nn.ModuleDict):
            owner = owner.rpartition(".")[0]
        return name in self._called or owner not in self._called or (owner, rate) in self._rates

    def _begin(self, name: str, *_: Any) -> None:
        self._stack.append(name)
        self._called.add(name)

    def _end(self, *_: Any) -> None:
        self._stack.pop()


def dropout_rate(before: Tensor, after: Tensor, claim: float) -> float | None:
    """Return the dropout rate between two tensors, or None if the change is not dropout.

    The factor of the remaining elements gives one rate, and their share gives another one. If these differ,
    return the one that is further from the claim.
    """
    is_present = before != 0
    dropped, kept = ((is_present & x).any(dim=-1) for x in (after == 0, after != 0))
    before, after = (x.detach().double()[is_present] for x in (before, after))
    is_kept = after != 0
    if not is_kept.any():
        return None
    factors = after[is_kept] / before[is_kept]
    if factors.max() - factors.min() > 1e-4 * factors.mean():
        return None
    rate, share = float(1 - 1 / factors.mean()), 1 - float(is_kept.double().mean())
    if not (dropped & kept).any() and max(share, abs(rate)) > 1e-4:
        return None  # stochastic depth drops rows
    error = _STANDARD_ERRORS * math.sqrt(max(rate * (1 - rate), 0.0) / len(before)) + 1 / len(before)
    if abs(share - rate) <= error:
        return rate if rate > 1e-4 else 0.0
    return max(rate, share, key=lambda x: abs(x - claim))

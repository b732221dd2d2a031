"""Call form: the way in which a model takes a batch.

Shapes: B batch, T positions, C width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CallForm", "ContiguousCall", "call_forms", "forward_parameters", "unwrapped"]

_KEYS = ("input_ids", "tokens", "inputs", "x")


@dataclass(frozen=True)
class CallForm:
    """Way to pass inputs and further arguments to a model.

    Attributes:
        keyword: the inputs' name; None: they are the first argument.
        in_batch: all is given in one dict.
        with_targets: also pass the inputs as `targets`. Some models return all logits only with targets.
        complete: also pass a mask of ones, and the inputs as labels.
        element: index of the logits in a tuple.
    """

    keyword: str | None = None
    in_batch: bool = False
    with_targets: bool = False
    complete: bool = False
    element: int = 0

    def __call__(self, model: nn.Module, inputs: Tensor, **more: Any) -> Any:
        """Call `model` with inputs (B, T) or (B, T, C), and with `more` by name.

        If the output is a tuple, the logits are moved to the front.
        """
        if self.with_targets:
            more = {"targets": inputs, **more}
        if self.complete:
            ones = torch.ones(inputs.shape[:2], dtype=torch.long, device=inputs.device)
            more = {"attention_mask": ones, "labels": inputs, **more}
        if self.keyword is None:
            return self._logits_first(model(inputs, **more))
        named = {self.keyword: inputs, **more}
        return self._logits_first(model(named) if self.in_batch else model(**named))

    def _logits_first(self, output: Any) -> Any:
        if not isinstance(output, tuple | list) or hasattr(output, "logits") or hasattr(output, "loss"):
            return output
        if not 0 < self.element < len(output):
            return output
        return (output[self.element], *output[: self.element], *output[self.element + 1 :])

    def __str__(self) -> str:
        return self._call() + (f", logits at [{self.element}] of the output" if self.element else "")

    def _call(self) -> str:
        if self.in_batch:
            names = [str(self.keyword), *(("attention_mask", "labels") if self.complete else ())]
            return f"called with a dict of {', '.join(names)}"
        if self.keyword is not None:
            return f"called with {self.keyword}="
        return "called with targets=, for all logits" if self.with_targets else "called with inputs"


@dataclass(frozen=True)
class ContiguousCall:
    """Function of a ModelSpec that is called with contiguous tensors, as from a data loader.

    Models written for training loops use `view`, which fails on slices and transposed tensors. The inputs and
    all integer and boolean tensors become contiguous. Floating-point tensors after the inputs, such as a
    cache, are passed as they are.

    Attributes:
        function: (model, inputs, ...) -> anything.
    """

    function: Callable[..., Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> ContiguousCall:
        """Wrap `function`, unless it is wrapped already."""
        return function if isinstance(function, cls) else cls(function)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __str__(self) -> str:
        return str(self.function)

    def __call__(self, model: nn.Module, inputs: Tensor, *rest: Any) -> Any:
        """Call the function."""
        more = (
            value.contiguous() if isinstance(value, Tensor) and not value.is_floating_point() else value
            for value in rest
        )
        return self.function(model, inputs.contiguous(), *more)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the wrapper of torch.compile or DistributedDataParallel."""
    while True:
        wrapped = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            wrapped = model.module
        if not isinstance(wrapped, nn.Module):
            return model
        model = wrapped


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of `forward` by name. A wrapped model is unwrapped first."""
    return inspect.signature(unwrapped(model).forward).parameters


def call_forms(model: nn.Module) -> Iterator[CallForm]:
    """Return the call forms that the signature of `model` allows, the usual one first."""
    named = forward_parameters(model)
    yield CallForm()
    if "targets" in named:
        yield CallForm(with_targets=True)
    for key in _KEYS:
        if key in named and named[key].kind is inspect.Parameter.KEYWORD_ONLY:
            yield CallForm(key)
    required = [
        p
        for p in named.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) == 1:
        for complete in (False, True):
            for key in _KEYS:
                yield CallForm(key, in_batch=True, complete=complete)

"""Call form: how to pass a batch to a model, and where the logits are in its output.

`ContiguousCall` wraps functions of a ModelSpec, so that they get contiguous tensors.

Shapes: B batch, T positions, C width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from stackwise.subject.argument import Argument, arguments_for
from stackwise.support.system_errors import is_out_of_memory

__all__ = [
    "MASK",
    "CallForm",
    "ContiguousCall",
    "attempt",
    "call_forms",
    "can_generate",
    "forward_parameters",
    "unwrapped",
]

MASK = "attention_mask"
_KEYS = ("input_ids", "tokens", "inputs", "x")


@dataclass(frozen=True)
class CallForm:
    """Way to pass inputs and further arguments to a model.

    Attributes:
        keyword: the inputs' name; None: they are the first argument.
        in_batch: the model takes one dict.
        extras: further arguments. For example, nanoGPT returns all logits only if `targets` are passed.
        element: index of the logits in a tuple.
    """

    keyword: str | None = None
    in_batch: bool = False
    extras: tuple[Argument, ...] = ()
    element: int = 0

    def __call__(self, model: nn.Module, inputs: Tensor, **more: Any) -> Any:
        """Call `model` with inputs (B, T) or (B, T, C), and with `more` by name.

        If the output is a tuple, the logits are moved to the front.
        """
        more = {each.name: each.value(model, inputs) for each in self.extras if each.name not in more} | more
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
        if self.in_batch:
            call = f"a dict of {', '.join((str(self.keyword), *(each.name for each in self.extras)))}"
        else:
            given = [f"{self.keyword}="] if self.keyword else []
            call = " and ".join([*given, *map(str, self.extras)]) or "inputs"
        return f"called with {call}" + (f", logits at [{self.element}] of the output" if self.element else "")


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


def call_forms(model: nn.Module, widths: Sequence[int] = ()) -> Iterator[CallForm]:
    """Yield the call forms that the signature of `model` allows, the usual one first.

    Args:
        model: the model.
        widths: possible widths of vectors that it takes beside the inputs.
    """
    named = forward_parameters(model)
    usual = [CallForm()]
    if "targets" in named:
        usual.append(CallForm(extras=(Argument("targets"),)))
    usual += [CallForm(key) for key in _KEYS if key in named and named[key].kind is named[key].KEYWORD_ONLY]
    positional = [p for p in named.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    keywords = [p.name for p in named.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    missing: dict[CallForm, list[str]] = {}
    for form in usual:
        known = {form.keyword, *(each.name for each in form.extras)}
        has_inputs = bool(positional) or form.keyword is not None
        missing[form] = [name for name in (*required[1:], *keywords) if name not in known and has_inputs]
    further = {form: list(arguments_for(names, widths)) for form, names in missing.items()}
    yield from (form for form in usual if not further[form])
    if len(required) == 1:
        for extras in ((), (Argument(MASK, "mask"), Argument("labels"))):
            yield from (CallForm(key, in_batch=True, extras=extras) for key in _KEYS)
    for form in usual:
        yield from (replace(form, extras=(*form.extras, *extras)) for extras in further[form])


def can_generate(model: Any) -> bool | None:
    """Return the result of the model's method `can_generate`, or None if it has none."""
    method = getattr(model, "can_generate", None)
    answer = method() if inspect.ismethod(method) else None
    return answer if isinstance(answer, bool) else None


def attempt(call: Callable[[], Any]) -> Any:
    """Return the result of `call`; None if it raises any exception but an exhausted memory."""
    try:
        return call()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None

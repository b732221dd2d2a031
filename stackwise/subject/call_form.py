"""Call form: how to pass a batch to a model, and where the logits are in its output.

`ContiguousCall` wraps functions of a ModelSpec, so that they get contiguous tensors.

Shapes: B batch, T positions, C width.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.subject.argument import Argument, Read, arguments_for, known_kinds
from stackwise.subject.output import logits_of, part_of
from stackwise.support.system_errors import is_out_of_memory

__all__ = [
    "MASK",
    "CallForm",
    "ContiguousCall",
    "attempt",
    "call_forms",
    "can_generate",
    "forward_parameters",
    "influence_of_first",
    "required_names",
    "unwrapped",
]

MASK = "attention_mask"
_KEYS = ("input_ids", "tokens", "inputs", "x")


@dataclass(frozen=True)
class CallForm:
    """Way to pass inputs and further arguments to a model.

    Attributes:
        keyword: name of the argument for the inputs. None: the first argument.
        in_batch: the model takes one dict.
        extras: further arguments. For example, nanoGPT returns all logits only if `targets` are passed.
        element: index of the logits in a tuple.
        part: name of the logits in an object or a dict. "": a usual name, such as `logits`.
    """

    keyword: str | None = None
    in_batch: bool = False
    extras: tuple[Argument, ...] = ()
    element: int = 0
    part: str = ""

    def __call__(self, model: nn.Module, inputs: Tensor, **more: Any) -> Any:
        """Call `model` with inputs (B, T) or (B, T, C), and with `more` by name.

        If the output is a tuple, the logits are moved to the front. The named part becomes `logits`.
        """
        more = {each.name: each.value(model, inputs) for each in self.extras if each.name not in more} | more
        if self.keyword is None:
            return self._logits_first(model(inputs, **more))
        named = {self.keyword: inputs, **more}
        return self._logits_first(model(named) if self.in_batch else model(**named))

    def _logits_first(self, output: Any) -> Any:
        if self.part and (part := part_of(output, self.part)) is not None:
            parts = dict(output) if isinstance(output, Mapping) else vars(output)
            return SimpleNamespace(**parts | {"logits": part})
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
        place = f"[{self.element}]" if self.element else repr(self.part) if self.part else ""
        return f"called with {call}" + (f", logits at {place} of the output" if place else "")


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


def required_names(model: nn.Module) -> list[str]:
    """Return the required parameters of `forward`, positional ones first."""
    named = forward_parameters(model).values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in named if p.default is p.empty]
    positional = [p.name for p in required if p.kind in kinds]
    return positional + [p.name for p in required if p.kind is p.KEYWORD_ONLY]


def call_forms(
    model: nn.Module,
    widths: Sequence[int] = (),
    reads: Mapping[str, Read] | None = None,
    keys: Sequence[str] = (),
) -> Iterator[CallForm]:
    """Yield the call forms that the signature of `model` allows, the usual one first.

    Args:
        model: the model.
        widths: possible widths of further vectors.
        reads: kinds of the arguments that an operation with weights reads.
        keys: keys that the model reads, if it takes one dict.
    """
    named, required = forward_parameters(model), required_names(model)
    first = next(iter(named.values()), None)
    has_first = first is not None and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    ranked: list[tuple[float, CallForm]] = []
    for form in _usual_forms(named):
        main = form.keyword or (next(iter(named)) if has_first else None)
        missing = [name for name in required if name not in (main, *(each.name for each in form.extras))]
        further = list(arguments_for(missing, widths, reads)) if main is not None else []
        if not further:
            yield form
        ranked += [(rank, replace(form, extras=(*form.extras, *extras))) for extras, rank in further]
    if len(required) == 1:
        for extras in ((), (Argument(MASK, "mask"), Argument("labels"))):
            yield from (CallForm(key, in_batch=True, extras=extras) for key in _KEYS)
    ranked += _with_other_mains(required, widths, reads, keys)
    yield from (form for _, form in sorted(ranked, key=lambda each: each[0]))


def _usual_forms(named: Mapping[str, inspect.Parameter]) -> Iterator[CallForm]:
    yield CallForm()
    if "targets" in named:
        yield CallForm(extras=(Argument("targets"),))
    yield from (CallForm(k) for k in _KEYS if k in named and named[k].kind is named[k].KEYWORD_ONLY)


def _with_other_mains(
    required: Sequence[str], widths: Sequence[int], reads: Mapping[str, Read] | None, keys: Sequence[str]
) -> Iterator[tuple[float, CallForm]]:
    """Yield forms in which the inputs are another argument than the first one, and their rank.

    The output may be as long as another argument, such as the target of an encoder-decoder.
    """
    names = keys or required
    mains = [name for name in reads or {} if known_kinds(name)[:1] in ((), ("context",))]
    mains.sort(key=names.index)
    for place, main in enumerate(mains if keys else [name for name in mains if name != required[0]]):
        missing = [name for name in names if name != main]
        further = [((), 0)] if not missing else list(arguments_for(missing, widths, reads))
        late = 0.5 * (place + (not keys))
        yield from ((rank + late, CallForm(main, bool(keys), extras)) for extras, rank in further)


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


def influence_of_first(
    call: Callable[..., Any], model: nn.Module, inputs: Tensor, named: Mapping[str, Any]
) -> float:
    """Return the change of the other outputs if the first input changes, relative to the output."""
    changed, first = inputs.clone(), inputs[:, 0]
    if inputs.is_floating_point():
        changed[:, 0] = first + 1
    else:
        changed[:, 0] = torch.where(first == inputs.max(), inputs.min(), inputs.max())
    one, two = (logits_of(call(model, x, **named)) for x in (inputs, changed))
    if one.shape[:2] == inputs.shape[:2]:
        one, two = one[:, 1:], two[:, 1:]
    size = one.abs().max()
    return float((one - two).abs().max() / size) if size else math.inf  # 0: a mask hides all outputs

"""Execution of a call: choose the function of the spec, and add the arguments of the others.

A ModelSpec has a function for each way to call a model: `masked`, `packed`, `decode`, `labelled_loss`. A call
with a mask and documents needs the arguments of two of them. The engine calls one function, records the
arguments that the other one passes to the model, and adds them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.engine.question import Call, Transform
from stackwise.checks.engine.variation import Refused
from stackwise.subject.call_form import forward_parameters
from stackwise.subject.inference import cast, logits_of
from stackwise.subject.spec import ModelSpec

__all__ = ["accepts", "changed_calls", "decode_takes_mask", "execute", "loss_of", "passes"]


def execute(spec: ModelSpec, model: nn.Module, call: Call) -> Tensor:
    """Return the logits (B, W, V), or (B, V) per row."""
    ordered = call.ordered()
    run = _in_parts if call.parts else _at_once
    return call.restored(logits_of(run(spec, model, ordered)))


def loss_of(spec: ModelSpec, model: nn.Module, call: Call) -> Tensor:
    """Return the model's own loss of the labels of a call, a scalar."""
    loss: Tensor = _at_once(spec, model, call)
    return loss


def _at_once(spec: ModelSpec, model: nn.Module, call: Call) -> Any:
    """Return the output of one function of the spec, which also gets the arguments of the other ones."""
    inputs = cast(call.inputs, model)
    functions = (spec.labelled_loss, call.labels), (spec.packed, call.documents), (spec.masked, call.keep)
    needed = [(_needed(function), given) for function, given in functions if given is not None]
    arguments: dict[str, Any] = {}
    for function, given in reversed(needed[1:]):
        arguments |= _recorded(spec, model, inputs, function, given)
    with changed_calls(model, arguments | call.arguments, call.transforms, inputs.shape[1]):
        return needed[0][0](model, inputs, needed[0][1]) if needed else spec.forward(model, inputs)


def decode_takes_mask(spec: ModelSpec) -> bool:
    """Return True if `decode` has a fourth parameter, the mask of all tokens so far."""
    parameters = inspect.signature(_needed(spec.decode)).parameters.values()
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) > 3


def accepts(model: nn.Module, name: str) -> bool:
    """Return True if `forward` has a parameter with this name."""
    return name in forward_parameters(model)


def passes(spec: ModelSpec, model: nn.Module, inputs: Tensor, name: str) -> bool:
    """Return True if the plain call of the spec passes this argument to `forward`."""
    try:
        return name in _arguments_of(model, lambda: spec.forward(model, cast(inputs, model)))
    except Refused:
        return False


def _in_parts(spec: ModelSpec, model: nn.Module, call: Call) -> Tensor:
    """Return the logits of parts that pass through the cache."""
    question = call.question
    cache, other_cache = None if question.first_cache is None else question.first_cache(model), None
    end, outputs = 0, []
    if call.keep is not None and not decode_takes_mask(spec):
        raise Refused("decode takes no mask")
    for index, size in enumerate(call.parts):
        columns, end = slice(end, end + size), end + size
        shift = len(call.parts) - 1 - index if question.turns_rows else 0
        decode = partial(_decoded, spec, model, call, columns, shift)
        if question.operation is not None:
            cache = question.operation(cache, call, columns, decode)
        output, cache = decode(call.inputs, cache)
        if question.in_turns:
            _, other_cache = decode(call.others, other_cache)
        outputs.append(logits_of(output).roll(-shift, dims=0))
        if outputs[-1].shape[1] != size:
            raise Refused(f"{size} tokens at once gave {outputs[-1].shape[1]} outputs")
    return torch.cat(outputs, dim=1)


def _decoded(
    spec: ModelSpec,
    model: nn.Module,
    call: Call,
    columns: slice,
    shift: int,
    inputs: Tensor | None,
    cache: Any,
) -> tuple[Any, Any]:
    """Decode columns of the inputs, with the rows rolled by `shift`. Return the output and the cache."""
    assert inputs is not None

    def part_of(x: Tensor, columns: slice) -> Tensor:
        return (x.roll(shift, dims=0) if shift else x)[:, columns].contiguous()

    mask = () if call.keep is None else (part_of(call.keep, slice(columns.stop)),)
    arguments = {
        name: part_of(value, columns) if isinstance(value, Tensor) else value
        for name, value in call.arguments.items()
    }
    with changed_calls(model, arguments, call.transforms, columns.stop - columns.start):
        decoded: tuple[Any, Any] = _needed(spec.decode)(
            model, cast(part_of(inputs, columns), model), cache, *mask
        )
    return decoded


def _needed(function: Callable[..., Any] | None) -> Callable[..., Any]:
    assert function is not None
    return function


class _Recorded(BaseException):
    """Arguments of a call that did not take place. No `except Exception` of a user stops it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


def _recorded(
    spec: ModelSpec, model: nn.Module, inputs: Tensor, function: Callable[..., Any], given: Tensor
) -> dict[str, Any]:
    """Return the arguments that `function(model, inputs, given)` passes to the model beyond the inputs."""
    with_it = _arguments_of(model, lambda: function(model, inputs, given))
    without = _arguments_of(model, lambda: spec.forward(model, inputs))
    return {name: value for name, value in with_it.items() if name not in without}


def _arguments_of(model: nn.Module, run: Callable[[], object]) -> dict[str, Any]:
    names = list(forward_parameters(model))

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args and isinstance(args[0], Mapping):
            raise _Recorded(dict(args[0]))
        raise _Recorded(dict(zip(names, args, strict=False)) | kwargs)

    try:
        with model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True):
            run()
    except _Recorded as recorded:
        return recorded.arguments
    raise Refused("a declared function does not call the model itself, so its arguments are unknown")


@contextmanager
def changed_calls(
    model: nn.Module, arguments: Mapping[str, Any], transforms: Sequence[Transform] = (), width: int = 0
) -> Iterator[None]:
    """Inside, each call of the model gets further arguments, unless the caller passes them.

    Then `transforms` change all arguments of the call, which has `width` columns.

    Raises:
        Refused: the model itself was not called, such as by `forward=lambda m, x: m.decoder(x)`.
    """
    if not arguments and not transforms:
        yield
        return
    first, *names = forward_parameters(model)
    calls: list[bool] = []

    def transformed(given: dict[str, Any]) -> dict[str, Any]:
        for transform in transforms:
            given = transform(given, width)
        return given

    def hook(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        calls.append(True)
        if args and isinstance(args[0], Mapping):
            return (transformed({**arguments, **args[0]}), *args[1:]), kwargs
        inputs, args = args[:1], args[1:]
        if "inputs_embeds" in arguments:  # they replace the ids
            inputs, kwargs = (), {name: value for name, value in kwargs.items() if name != first}
        if not transforms:
            # An argument that the call passes by position stays as it is.
            added = {name: value for name, value in arguments.items() if name not in names[: len(args)]}
            return (*inputs, *args), {**added, **kwargs}
        return inputs, transformed({**arguments, **dict(zip(names, args, strict=False)), **kwargs})

    with model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True):
        yield
    if not calls:
        raise Refused("forward= does not call the model itself, so that arguments cannot be added")

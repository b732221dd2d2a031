"""Example code: a likely ModelSpec as code, for the message of an error."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.subject.call_form import CallForm, attempt, forward_parameters
from stackwise.subject.inference.inputs import (
    image_channels,
    is_sequence,
    reads_images_or_audio,
    vocabulary_candidates,
    vocabulary_read,
    width_candidates,
)
from stackwise.subject.output import LOGITS_NAME

__all__ = [
    "example_with_key",
    "examples_by_keys",
    "examples_by_output",
    "examples_by_signature",
    "returns_loss",
]


def examples_by_output(
    model: nn.Module, known: Mapping[str, Any], form: CallForm | None, inputs: Tensor, output: Any
) -> Iterator[tuple[int, str]]:
    """Yield a ModelSpec for outputs that are not named logits, or have one number per position."""
    kind = "vectors" if inputs.is_floating_point() else "tokens"
    width = inputs.shape[-1] if kind == "vectors" else max(vocabulary_candidates(model), default=0)
    given = _sequence(known, kind, width) if is_sequence(inputs) and "make_batch" not in known else ""
    if isinstance(output, Tensor) and output.shape == inputs.shape[:2]:
        yield 4, _example_text(known, given, f"{_written(form)}[..., None]")
    mapping = isinstance(output, Mapping)
    parts = output if mapping else getattr(output, "__dict__", {})
    for name, part in parts.items():
        rank = _rank(str(name), part, inputs, width)
        if rank is not None:
            place = f'["{name}"]' if mapping else f".{name}"
            yield rank, _example_text(known, given, _written(form) + place)


def _rank(name: str, part: Any, inputs: Tensor, width: int) -> int | None:
    """Return the rank of a part of an output, or None if it has no entry per position or per row."""
    if not (isinstance(part, Tensor) and part.is_floating_point() and part.ndim):
        return None
    is_per_position = part.ndim == 3 and part.shape[:2] == inputs.shape[:2]
    if not is_per_position and len(part) != len(inputs):
        return None
    is_likely = part.shape[-1] == width if is_per_position else LOGITS_NAME.search(name)
    return 3 + is_per_position + bool(is_likely)


def example_with_key(model: nn.Module, known: Mapping[str, Any], key: Any) -> Iterator[tuple[int, str]]:
    """Yield a ModelSpec whose call passes one key more."""
    for rank, inputs_text in _likely_inputs(model, known):
        yield rank, _example_text(known, inputs_text, f'm({{..., "{key}": ...}})')


def examples_by_keys(model: nn.Module, known: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield a ModelSpec with the keys that the model reads from a batch. The first one gets the inputs."""

    class Batch(dict[str, Tensor]):
        def __missing__(self, key: str) -> Tensor:
            self[key] = ids
            return ids

    ids, batch = _two_batches(model)[0], Batch()
    attempt(lambda: model(batch))
    values = [f'"{key}": {"..." if place else "x"}' for place, key in enumerate(batch)]
    for rank, inputs_text in _likely_inputs(model, known) if values else ():
        yield rank + 2, _example_text(known, inputs_text, f"m({{{', '.join(values)}}})")


def examples_by_signature(model: nn.Module, known: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield a ModelSpec if the model takes images, or needs more than one argument."""
    required = _required(model)
    if len(required) < 2 and not any(p.kind is p.KEYWORD_ONLY for p in required):
        images = [text for _, text in _likely_inputs(model, known) if "make_batch" in text]
        yield from ((0, _example_text(known, text)) for text in images)
        return
    first, *rest = required
    x = f"{first.name}=x" if first.kind is first.KEYWORD_ONLY else "x"
    call = ", ".join([x, *(f"{p.name}=..." for p in rest)])
    for rank, inputs_text in _likely_inputs(model, known):
        yield rank, _example_text(known, inputs_text, f"m({call})")


def returns_loss(model: nn.Module) -> bool:
    """Return True if a model with several required arguments returns a scalar."""
    if len(_required(model)) < 2:
        return False
    output = attempt(lambda: _call_with_all(model, _two_batches(model)[0]))
    return isinstance(output, Tensor) and output.ndim == 0


def _required(model: nn.Module) -> list[inspect.Parameter]:
    """Return the required parameters of `forward`, positional ones first."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = forward_parameters(model).values()
    return [p for p in parameters if p.default is p.empty and p.kind not in variadic]


def _call_with_all(model: nn.Module, x: Tensor) -> Any:
    """Call a model with `x` as its first argument, and other ids as all other required arguments."""
    first, *rest = _required(model)
    other = _two_batches(model)[1]
    arguments = [(first, x), *((p, other) for p in rest)]
    positional = [value for p, value in arguments if p.kind is not p.KEYWORD_ONLY]
    return model(*positional, **{p.name: value for p, value in arguments if p.kind is p.KEYWORD_ONLY})


def _two_batches(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return two batches of ids that each embedding takes, unless it is tiny."""
    smallest = min((size for size in vocabulary_candidates(model) if size > 1), default=2)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    one, other = torch.randint(smallest, (2, 2, 8), device=device)
    return one, other


def _likely_inputs(model: nn.Module, known: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield the likely inputs as keywords of ModelSpec.of, with a priority."""
    if "make_batch" in known:
        return
    if (channels := image_channels(model)) is not None and reads_images_or_audio(model):
        images = f"torch.randn(batch_size, {channels}, HEIGHT, WIDTH, generator=generator)"
        yield 2, f"make_batch=lambda batch_size, seq_len, generator: {images}"
    # The table that reads the first argument may be smaller than that of another one.
    read = vocabulary_read(model, _call_with_all, _two_batches(model)[0]) if _required(model) else None
    tokens = [read] if read is not None else vocabulary_candidates(model)[-1:]
    sizes = {"tokens": tokens, "vectors": width_candidates(model)[:1]}
    for rank, kind in ((1, "tokens"), (0, "vectors")):
        if known.get("inputs", kind) == kind:
            yield from ((rank, _sequence(known, kind, width)) for width in sizes[kind])


def _sequence(known: Mapping[str, Any], kind: str, width: int) -> str:
    """Return ids or vectors as keywords of ModelSpec.of. A declared width takes precedence."""
    return f'inputs="{kind}", width={known.get("width", width)}'


def _example_text(known: Mapping[str, Any], inputs: str, call: str = "") -> str:
    """Return a ModelSpec as code."""
    forward = f"forward=lambda m, x: {call}" if call else ""
    return f"ModelSpec.of({', '.join(filter(None, (known['name'], inputs, forward)))})"


def _written(form: CallForm | None) -> str:
    """Return a call of this form as code; None: the declared call, whose code is unknown."""
    if form is None:
        return "m(...)"
    values: dict[str, str] = {"inputs": "x", "mask": "torch.ones(x.shape[:2], dtype=torch.long)"}
    more = [(each.name, values.get(each.kind, "...")) for each in form.extras]
    if form.in_batch:
        batch = [f'"{name}": {value}' for name, value in [(form.keyword, "x"), *more]]
        return f"m({{{', '.join(batch)}}})"
    first = "x" if form.keyword is None else f"{form.keyword}=x"
    return f"m({', '.join([first, *(f'{name}={value}' for name, value in more)])})"

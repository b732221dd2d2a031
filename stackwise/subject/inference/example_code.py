"""Example code: a likely ModelSpec as code, for the message of an error."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from stackwise.subject.call_form import MASK, CallForm, forward_parameters
from stackwise.subject.inference.inputs import (
    image_channels,
    reads_images_or_audio,
    vocabulary_candidates,
    width_candidates,
)

__all__ = ["examples_by_missing", "examples_by_output", "examples_by_signature"]


def examples_by_output(
    model: nn.Module, known: Mapping[str, Any], form: CallForm, inputs: Tensor, output: Any
) -> Iterator[tuple[int, str]]:
    """Yield a ModelSpec for outputs that are not named logits, or have one number per position."""
    kind = "vectors" if inputs.is_floating_point() else "tokens"
    width = inputs.shape[-1] if kind == "vectors" else max(vocabulary_candidates(model), default=0)
    if isinstance(output, Tensor):
        yield 4, _example_text(known, _sequence(known, kind, width), f"{_written(form)}[..., None]")
    mapping = isinstance(output, Mapping)
    parts = output if mapping else getattr(output, "__dict__", {})
    for name, part in parts.items():
        if isinstance(part, Tensor) and part.ndim == 3 and part.shape[:2] == inputs.shape[:2]:
            place = f'["{name}"]' if mapping else f".{name}"
            text = _example_text(known, _sequence(known, kind, width), _written(form) + place)
            yield 5 if part.shape[-1] == width else 4, text


def examples_by_missing(
    model: nn.Module, known: Mapping[str, Any], missing: Mapping[str, str]
) -> Iterator[tuple[int, str]]:
    """Yield a ModelSpec with the keys that the model read from a batch."""
    inputs = next((name for name in missing if name in missing.values()), None)
    for sought in list(missing.values())[:1]:
        batch = f'"{sought}": x' if inputs is None else f'"{inputs}": x, "{missing[inputs]}": ...'
        for rank, inputs_text in _likely_inputs(model, known):
            yield rank + 2, _example_text(known, inputs_text, f"m({{{batch}}})")


def examples_by_signature(model: nn.Module, known: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield a ModelSpec if the model takes images, or needs more than one argument."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = forward_parameters(model).values()
    required = [p for p in named if p.default is p.empty and p.kind not in variadic]
    by_name = [p for p in required if p.kind is p.KEYWORD_ONLY]
    if len(required) < 2 and not by_name:
        images = [text for _, text in _likely_inputs(model, known) if "make_batch" in text]
        yield from ((0, _example_text(known, text)) for text in images)
        return
    first = next((p for p in required if p not in by_name), by_name[0] if by_name else required[0])
    others = [f"{p.name}=..." for p in required if p is not first]
    call = ", ".join([f"{first.name}=x" if first in by_name else "x", *others])
    for rank, inputs_text in _likely_inputs(model, known):
        yield rank, _example_text(known, inputs_text, f"m({call})")


def _likely_inputs(model: nn.Module, known: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield the likely inputs as keywords of ModelSpec.of, with a priority."""
    if "make_batch" in known:
        return
    if (channels := image_channels(model)) is not None and reads_images_or_audio(model):
        images = f"torch.randn(batch_size, {channels}, HEIGHT, WIDTH, generator=generator)"
        yield 2, f"make_batch=lambda batch_size, seq_len, generator: {images}"
    sizes = {"tokens": vocabulary_candidates(model)[-1:], "vectors": width_candidates(model)[:1]}
    for rank, kind in ((1, "tokens"), (0, "vectors")):
        if known.get("inputs", kind) == kind:
            yield from ((rank, _sequence(known, kind, width)) for width in sizes[kind])


def _sequence(known: Mapping[str, Any], kind: str, width: int) -> str:
    """Return ids or vectors as keywords of ModelSpec.of. A declared width takes precedence."""
    return f'inputs="{kind}", width={known.get("width", width)}'


def _example_text(known: Mapping[str, Any], inputs: str, call: str = "") -> str:
    """Return a ModelSpec as code."""
    forward = f", forward=lambda m, x: {call}" if call else ""
    return f"ModelSpec.of({known['name']}, {inputs}{forward})"


def _written(form: CallForm) -> str:
    """Return a call of this form as code."""
    ones = {MASK: "torch.ones(x.shape[:2], dtype=torch.long)"}
    more = [(name, ones.get(name, "x")) for name in form.extras]
    if form.in_batch:
        batch = [f'"{name}": {value}' for name, value in [(form.keyword, "x"), *more]]
        return f"m({{{', '.join(batch)}}})"
    first = "x" if form.keyword is None else f"{form.keyword}=x"
    return f"m({', '.join([first, *(f'{name}={value}' for name, value in more)])})"

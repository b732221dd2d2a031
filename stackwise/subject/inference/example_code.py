"""Example code: a likely ModelSpec as code, for the message of an error."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from stackwise.subject.call_form import CallForm, forward_parameters
from stackwise.subject.inference.masked_form import MASK, MaskedForm
from stackwise.subject.inference.sizes import vocabulary_candidates, width_candidates

__all__ = ["examples_by_convolution", "examples_by_missing", "examples_by_output", "examples_by_signature"]


def examples_by_output(
    model: nn.Module, known: Mapping[str, Any], form: CallForm, inputs: Tensor, output: Any
) -> Iterator[tuple[int, str]]:
    """Yield a ModelSpec for outputs that are not named logits."""
    kind = "vectors" if inputs.is_floating_point() else "tokens"
    width = inputs.shape[-1] if kind == "vectors" else max(vocabulary_candidates(model), default=0)
    mapping = isinstance(output, Mapping)
    parts = output if mapping else getattr(output, "__dict__", {})
    for name, part in parts.items():
        if isinstance(part, Tensor) and part.ndim == 3 and part.shape[:2] == inputs.shape[:2]:
            place = f'["{name}"]' if mapping else f".{name}"
            text = _example_text(known, kind, width, _written(form) + place)
            yield 5 if part.shape[-1] == width else 4, text


def examples_by_missing(
    model: nn.Module, known: Mapping[str, Any], missing: Mapping[str, str]
) -> Iterator[tuple[int, str]]:
    """Yield a ModelSpec with the keys that the model read from a batch."""
    inputs = next((name for name in missing if name in missing.values()), None)
    for sought in list(missing.values())[:1]:
        batch = f'"{sought}": x' if inputs is None else f'"{inputs}": x, "{missing[inputs]}": ...'
        for rank, kind, width in _likely_inputs(model, known):
            yield rank + 2, _example_text(known, kind, width, f"m({{{batch}}})")


def examples_by_signature(model: nn.Module, known: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield a ModelSpec if the model needs more than one argument."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = forward_parameters(model).values()
    required = [p for p in named if p.default is p.empty and p.kind not in variadic]
    by_name = [p for p in required if p.kind is p.KEYWORD_ONLY]
    if len(required) < 2 and not by_name:
        return
    first = next((p for p in required if p not in by_name), by_name[0] if by_name else required[0])
    others = [f"{p.name}=..." for p in required if p is not first]
    call = ", ".join([f"{first.name}=x" if first in by_name else "x", *others])
    for rank, kind, width in _likely_inputs(model, known):
        yield rank, _example_text(known, kind, width, f"m({call})")


def examples_by_convolution(model: nn.Module, known: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield a ModelSpec with images if the model begins with a convolution over images."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if first is not None and "make_batch" not in known:
        images = f"torch.randn(batch_size, {first.in_channels}, HEIGHT, WIDTH, generator=generator)"
        batch = f"make_batch=lambda batch_size, seq_len, generator: {images}"
        yield 6, f"ModelSpec.of({known['name']}, {batch})"


def _likely_inputs(model: nn.Module, known: Mapping[str, Any]) -> Iterator[tuple[int, str, int]]:
    """Return kind and width of the likely inputs, with a priority."""
    sizes = {"tokens": vocabulary_candidates(model)[-1:], "vectors": width_candidates(model)[:1]}
    for rank, kind in ((1, "tokens"), (0, "vectors")):
        if known.get("inputs", kind) == kind:
            yield from ((rank, kind, width) for width in sizes[kind])


def _example_text(known: Mapping[str, Any], kind: str, width: int, call: str) -> str:
    """Return a ModelSpec as code. Declared attributes take precedence."""
    width = known.get("width", width)
    return f'ModelSpec.of({known["name"]}, inputs="{kind}", width={width}, forward=lambda m, x: {call})'


def _written(form: CallForm) -> str:
    """Return a call of this form as code."""
    more = ["targets=x"] if form.with_targets else []
    if isinstance(form, MaskedForm):
        more.append(f"{MASK}=torch.ones(x.shape[:2], dtype=torch.long)")
    if form.in_batch:
        batch = [f'"{form.keyword}": x']
        if form.complete:
            batch += [f'"{MASK}": torch.ones(x.shape[:2], dtype=torch.long)', '"labels": x']
        return f"m({{{', '.join(batch)}}})"
    return f"m({', '.join(['x' if form.keyword is None else f'{form.keyword}=x', *more])})"

"""Trial: call a model in several forms until one gives logits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.subject.call_form import CallForm, call_forms
from stackwise.subject.inference.example_code import (
    examples_by_convolution,
    examples_by_missing,
    examples_by_output,
    examples_by_signature,
)
from stackwise.subject.inference.masked_form import masked_forms
from stackwise.subject.inference.output import cast, logit_places, logits_of, part_of
from stackwise.subject.inference.sizes import (
    example_batch,
    is_sequence,
    vocabulary_candidates,
    width_candidates,
)
from stackwise.support.system_errors import is_out_of_memory

__all__ = ["InferenceError", "Trial", "try_calls"]

_TRIAL_LENGTHS = (16, 8, 4)
_LONGEST_ERROR = 160


class InferenceError(ValueError):
    """No call of the model gave logits, so that the call must be declared."""


@dataclass
class _Vain:
    """Calls that did not give logits.

    Attributes:
        errors: error -> the inputs that caused it.
        missing: name of the inputs in a dict -> another key that the model read.
        examples: likely ModelSpecs as code, each with a priority.
    """

    errors: dict[str, list[str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    examples: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class Trial:
    """Result of a call that gave logits.

    Attributes:
        element: index of the logits in a tuple of outputs.
        n_others: number of other outputs that could be logits.
        auxiliary: True if the output has a router loss.
        attributes: attributes of a ModelSpec: kind and width of the inputs, and a length that works.
    """

    element: int = 0
    n_others: int = 0
    auxiliary: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def try_calls(model: nn.Module, known: dict[str, Any]) -> tuple[CallForm | None, Trial]:
    """Return the call form (None: the declared one) and the result of its call."""
    vain = _Vain()
    forms = [None] if "forward" in known else [*call_forms(model), *masked_forms(model)]
    for form in forms:
        trial = _try_form(model, known, known["forward"] if form is None else form, vain)
        if trial is not None:
            return None if form is None else replace(form, element=trial.element), trial
    lines = [f"{', '.join(dict.fromkeys(inputs))}: {error}" for error, inputs in vain.errors.items()]
    if "forward" not in known:
        vain.examples += examples_by_missing(model, known, vain.missing)
        vain.examples += examples_by_signature(model, known)
    vain.examples += examples_by_convolution(model, known)
    example = max(vain.examples, key=lambda each: each[0], default=(0, ""))[1]
    raise InferenceError(
        f"{known['name']}: no call was found that gives (batch, positions, width). Declare inputs=, width= "
        "and forward= in ModelSpec.of(factory, ...). Tried:\n  "
        + "\n  ".join(lines or ["nothing: no layers seen"])
        + (f"\nFor example: {example}" if example else "")
    )


def _try_form(
    model: nn.Module, known: dict[str, Any], forward: Callable[..., Any], vain: _Vain
) -> Trial | None:
    """Return the result of a call, or None after adding the error to `vain`."""

    def attempt(inputs: Tensor) -> tuple[Trial, int] | None:
        """Return the trial and the width of its logits."""
        device = next((p.device for p in model.parameters()), inputs.device)
        given, trial, output = cast(inputs.to(device), model), Trial(), None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a wrong call
                output = forward(model, given)
            if isinstance(forward, CallForm):
                trial.auxiliary = part_of(output, "aux_loss") is not None
                if places := logit_places(output, given):
                    trial.element = _place_of_logits(model, forward, output, given, places)
                    trial.n_others = len(places) - 1
                    output = output[trial.element]
            logits = logits_of(output)
        except Exception as error:  # every other error means that the call is wrong
            if is_out_of_memory(error):
                raise
            text = shorten(f"{type(error).__name__}: {error}", _LONGEST_ERROR, placeholder=" ...")
            vain.errors.setdefault(text, []).append(_describe(inputs))
            if isinstance(forward, CallForm) and output is not None:
                vain.examples += examples_by_output(model, known, forward, inputs, output)
            elif isinstance(forward, CallForm) and forward.in_batch and isinstance(error, KeyError):
                vain.missing[str(forward.keyword)] = str(next(iter(error.args), ""))
            return None
        # Images have no positions, so one row per image is enough.
        rows = 2 if is_sequence(inputs) else 1
        sized = logits.ndim == 3 if rows == 2 else logits.ndim > 1
        if sized and logits.shape[:rows] == inputs.shape[:rows] and logits.is_floating_point():
            return trial, logits.shape[-1]
        vain.errors.setdefault(f"output of shape {tuple(logits.shape)}", []).append(_describe(inputs))
        return None

    if "make_batch" in known:
        seq_len = known.get("seq_len", min(known["max_length"] or _TRIAL_LENGTHS[0], _TRIAL_LENGTHS[0]))
        inputs = example_batch(model, {**known, "seq_len": seq_len})
        if (found := attempt(inputs)) is None:
            return None
        trial, width = found
        kind = "vectors" if inputs.is_floating_point() else "tokens"
        of_inputs = (
            inputs.shape[-1] if kind == "vectors" else max(vocabulary_candidates(model), default=width)
        )
        trial.attributes = {"inputs": kind, "width": of_inputs, "seq_len": seq_len}
        return trial
    kinds = (known["inputs"],) if "inputs" in known else ("tokens", "vectors")
    limit = known["max_length"] or max(_TRIAL_LENGTHS)
    lengths = (known["seq_len"],) if "seq_len" in known else tuple(t for t in _TRIAL_LENGTHS if t <= limit)
    for seq_len in lengths or (limit,):
        if "tokens" in kinds:
            accepted = None
            for vocab_size in (known["width"],) if "width" in known else vocabulary_candidates(model):
                if (found := attempt(torch.randint(vocab_size, (2, seq_len)))) is None:
                    continue
                trial, width = found
                trial.attributes = {"inputs": "tokens", "width": vocab_size, "seq_len": seq_len}
                if width == vocab_size:
                    return trial
                accepted = accepted or trial  # of the smallest
            if accepted:
                return accepted
        if "vectors" in kinds:
            for width in (known["width"],) if "width" in known else width_candidates(model):
                if (found := attempt(torch.randn(2, seq_len, width))) is not None:
                    trial, _ = found
                    trial.attributes = {"inputs": "vectors", "width": width, "seq_len": seq_len}
                    return trial
    return None


def _place_of_logits(
    model: nn.Module, form: CallForm, output: Sequence[Tensor], inputs: Tensor, places: list[int]
) -> int:
    """Return the index of the first output with the width of the vocabulary, otherwise the first index."""
    if len(places) == 1 or inputs.is_floating_point():
        return places[0]
    read = _vocabulary_read(model, form, inputs)
    known = [size for size in reversed(vocabulary_candidates(model)) if size != read]
    for size in (read, *known):
        for place in places:
            if output[place].shape[-1] == size:
                return place
    return places[0]


def _vocabulary_read(model: nn.Module, form: CallForm, inputs: Tensor) -> int | None:
    """Return the size of the embedding that reads the ids themselves."""
    sizes: list[int] = []

    def see(module: nn.Module, given: tuple[Any, ...]) -> None:
        if given and isinstance(given[0], Tensor) and torch.equal(given[0], inputs):
            sizes.append(module.num_embeddings)  # type: ignore[arg-type]

    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    handles = [module.register_forward_pre_hook(see) for module in embeddings]
    try:
        form(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return next(iter(sizes), None)


def _describe(inputs: Tensor) -> str:
    if not is_sequence(inputs):
        return f"inputs {tuple(inputs.shape)}"
    kind = "vectors" if inputs.is_floating_point() else "ids"
    return f"{kind} {tuple(inputs.shape)}"

"""Infer: the attributes of a ModelSpec, found by calling the model.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.subject.cached_call import NO_PARAMETER
from stackwise.subject.call_form import CallForm, attempt, forward_parameters
from stackwise.subject.capability import capabilities, padding_of_rows
from stackwise.subject.facts import Facts, facts_in
from stackwise.subject.generation import GenerateCall, inferred_generate
from stackwise.subject.inference.causality import (
    ASSUMED_CAUSAL,
    CALL_READS_AHEAD,
    READS_AHEAD,
    claimed_causality,
)
from stackwise.subject.inference.inputs import (
    RandomBatch,
    example_batch,
    is_sequence,
    length_limit,
    limit_by_trial,
)
from stackwise.subject.inference.trial import Trial, try_calls
from stackwise.subject.output import logits_of
from stackwise.subject.rotary import rotary_source
from stackwise.support.random_state import random_states, random_states_equal, seeded

__all__ = ["infer"]

_MAX_UNUSED = 3


@torch.no_grad()
def infer(model: nn.Module, declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a ModelSpec that are not declared, with `assumed` and `notes`.

    Args:
        model: in eval mode. It is called, and its state may change.
        declared: known attributes. Only calls that agree with them are tried.

    Raises:
        InferenceError: no call gave an output. The message lists the calls.
    """
    notes: list[str] = []
    inferred, trial = _call(model, declared, notes)
    known = {**inferred, **declared}
    example = example_batch(model, known)
    notes.append(_inputs_note(example, known, has_shape="make_batch" in inferred))
    if trial.n_others:
        notes.append(f"uses output [{trial.element}]; {trial.n_others} more may be logits")
    is_per_position = known.get("per_position", True)
    if not is_per_position:
        inferred["causal"] = None
        notes.append(f"returns ({', '.join(['B', *map(str, trial.output_shape[1:])])}), an output per row")
    elif "causal" not in declared:
        inferred["causal"], reason = claimed_causality(model, known, has_own_call="forward" in declared)
        is_assumed = reason in (ASSUMED_CAUSAL, READS_AHEAD, CALL_READS_AHEAD)
        inferred["assumed"] = ("causal",) if is_assumed else ()
        notes.append(reason)
    known = {**inferred, **declared}
    if known["max_length"] is not None:
        notes.append(f"at most {known['max_length']} positions")
    if trial.form is not None and is_per_position:
        can, assumed = _capabilities(model, example, trial, declared, known)
        inferred |= can
        inferred["assumed"] = (*inferred.get("assumed", ()), *assumed)
        notes += _capability_notes(model, trial.form, can, assumed)
    elif trial.form is not None and _may_be_padded(trial, example, known):
        inferred |= padding_of_rows(model, example, trial.form)
        if "padding_sides" in inferred:
            inferred["assumed"] = ("padding_sides",)
        notes += ["found: masked"] if "masked" in inferred else []
    inferred["facts"], keys = facts_in(model)
    rotary = [f"rotary ({rotary_source(getattr(model, 'config', None))})"] if "rotary" in inferred else []
    own = declared.get("facts", Facts())
    facts = [f"{fact} ({key})" for fact, key in keys.items() if getattr(own, fact) is None]
    if stated := rotary + facts:
        notes.append("stated: " + ", ".join(stated))
    return inferred | {"notes": "; ".join(notes)}


def _capabilities(
    model: nn.Module, example: Tensor, trial: Trial, declared: Mapping[str, Any], known: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the capabilities that are not known, and the names of those that are assumed."""
    assert trial.form is not None
    shown = capabilities(
        model,
        example,
        trial.form,
        auxiliary=trial.auxiliary,
        cached="decode" not in declared and known["causal"] is not False,
        capacity=known["max_length"],
    )
    can = {key: value for key, value in shown.items() if key not in known}
    assumed = [name for name in can.pop("assumed", shown["assumed"]) if name in can]
    if known["inputs"] == "tokens" and known["causal"] and "generate" not in declared:
        sides = {**can, **known}.get("padding_sides", ())
        generate = inferred_generate(model, sides)
        prompts = [example[0], example[0]]
        if generate is not None and (
            _is_greedy(generate, model, prompts) or _is_in_style_of_nanogpt(generate, model, prompts)
        ):
            can["generate"] = generate
            # The checks of generation compare tokens from a cache inside the model with plain calls.
            if can.get("cache_problem", "").endswith(NO_PARAMETER):
                can["cache_problem"] = ""
    return can, assumed


def _capability_notes(
    model: nn.Module, form: CallForm, can: Mapping[str, Any], assumed: list[str]
) -> Iterator[str]:
    if named := [key for key in can if key != "cache_problem"]:
        yield "found: " + ", ".join(named)
    if "packed" in assumed:
        yield f"{can['packed'].keywords['name']}= separates documents only partly"
    if "labelled_loss" in can:
        yield _labels_note(can["labelled_loss"])
    if unused := _unused_arguments(model, form, can):
        yield f"not used: {', '.join(unused)} (declare a field such as labelled_loss or decode)"


def _is_greedy(call: GenerateCall, model: nn.Module, prompts: list[Tensor]) -> bool:
    """Return True if generation with a temperature of 0 runs, and no draw changes its tokens.

    A confident model seldom draws another token, so a call without a temperature must not draw at all.
    """
    found = []
    for seed in range(2):
        with seeded(seed):
            before = random_states()
            found.append(attempt(partial(call, model, prompts, max_new_tokens=2, temperature=0.0)))
            if found[-1] is not None and random_states_equal(before, random_states()):
                return True
    return "temperature" in call.options and found[0] is not None and found[0] == found[1]


def _is_in_style_of_nanogpt(call: GenerateCall, model: Any, prompts: list[Tensor]) -> bool:
    """Return True if generation has the parameters of nanoGPT and draws tokens.

    A bug in top_k is no reason to leave the method out, although it prevents greedy tokens.
    """
    parameters = inspect.signature(model.generate).parameters
    if {*list(parameters)[1:]} != {"max_new_tokens", "temperature", "top_k"}:
        return False
    if parameters["top_k"].default is not None or parameters["temperature"].default != 1.0:
        return False
    return attempt(partial(call, model, prompts, max_new_tokens=2, temperature=1.0)) is not None


def _may_be_padded(trial: Trial, example: Tensor, known: Mapping[str, Any]) -> bool:
    """Return True for sequences of any length, if neither `masked` is declared nor their shape inferred."""
    is_made = isinstance(known.get("make_batch"), RandomBatch)
    return is_sequence(example) and not is_made and not trial.shortens and "masked" not in known


def _labels_note(labelled_loss: Any) -> str:
    """Return the name of the labels and their convention."""
    name, is_shifted = labelled_loss.keywords["name"], "shift" in labelled_loss.keywords
    return f"{name}= " + ("takes the target of each position" if is_shifted else "is shifted by the model")


def _inputs_note(example: Tensor, known: Mapping[str, Any], *, has_shape: bool) -> str:
    if has_shape or not is_sequence(example):
        return f"takes inputs (B, {', '.join(map(str, example.shape[1:]))})"
    if known["inputs"] == "tokens":
        return f"takes token ids, vocabulary {known['width']}"
    return f"takes vectors of width {known['width']}"


def _call(model: nn.Module, declared: Mapping[str, Any], notes: list[str]) -> tuple[dict[str, Any], Trial]:
    """Return the attributes of the inputs and of the call, and the trial of the call."""
    max_length, is_doubtful = length_limit(model)
    inferred: dict[str, Any] = {"max_length": max_length}
    if "forward" not in declared and _is_sequence_first(model):
        inferred["forward"] = _transposed_call
        notes.append("batch_first=False: called with positions first")
    trial = try_calls(model, {**inferred, **declared})
    if max_length is not None and "max_length" not in declared:
        found = {"forward": trial.form, **inferred, **trial.attributes, **declared}
        inferred["max_length"] = limit_by_trial(model, found, is_doubtful=is_doubtful)
        if inferred["max_length"] != max_length:
            trial = try_calls(model, {**inferred, **declared})
    inferred |= trial.attributes
    if trial.form is not None and trial.form != CallForm():
        inferred["forward"] = trial.form
        notes.append(str(trial.form))
    return inferred, trial


def _unused_arguments(model: nn.Module, form: CallForm, found: Mapping[str, Any]) -> list[str]:
    """Return the optional arguments of `forward` that no call uses, such as labels with an unusual name.

    Models of libraries have many such arguments, so more than three are not listed.
    """
    if form.in_batch or hasattr(getattr(model, "config", None), "model_type"):
        return []
    used = {form.keyword, *("labels", "targets", "is_causal")}
    if "packed" in found:
        used |= {found["packed"].keywords.get("name"), "position_ids", "cu_seqlens"}
    if "labelled_loss" in found:
        used.add(found["labelled_loss"].keywords["name"])
    decode = str(found.get("decode", ""))
    parameters = forward_parameters(model)
    optional = [name for name, each in list(parameters.items())[1:] if each.default is None]
    masks = {name for name in optional if "mask" in name}
    unused = [name for name in optional if name not in used | masks and f"{name}=" not in decode]
    return [f"{name}=" for name in unused] if len(unused) <= _MAX_UNUSED else []


def _is_sequence_first(model: nn.Module) -> bool:
    """Return True if `batch_first` of a layer of torch, or of `forward`, says (positions, batch, ...)."""
    match model:
        case nn.RNNBase() | nn.MultiheadAttention():
            return not model.batch_first
        case nn.TransformerEncoder():
            return _is_sequence_first(model.layers[0])
        case nn.TransformerEncoderLayer():
            return not model.self_attn.batch_first
    argument = forward_parameters(model).get("batch_first")
    return argument is not None and argument.default is False


def _transposed_call(model: nn.Module, inputs: Tensor) -> Tensor:
    return logits_of(model(inputs.transpose(0, 1).contiguous())).transpose(0, 1)

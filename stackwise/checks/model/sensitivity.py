"""Sensitivity: inputs that a position may see have an effect on its output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import BoundArguments, signature
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.engine.call import execute
from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call
from stackwise.checks.probe.call import real_inputs, reason_of, refusals
from stackwise.checks.probe.difference import NOT_REPEATED, relative_difference
from stackwise.checks.probe.discarded import DiscardedResults
from stackwise.checks.probe.ties import selects_positions
from stackwise.checks.probe.unused_results import UnusedResults
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.subject.call_form import can_generate, forward_parameters
from stackwise.subject.capability import padding_id
from stackwise.subject.encoder_decoder import Decoder
from stackwise.support.hooks import temporary_hooks

# Other last tokens. At least one must have an effect.
_REPLACEMENTS = 8
_HIDDEN = -1e3  # a number below it hides a position in an additive mask

_ADVICE = (
    "Look for a window that is applied although it is switched off, a mask that hides too much, and a state "
    "that is overwritten."
)


@check
def token_effect(subject: Subject) -> CheckResult:
    """Does every input have an effect on the output (causal model: on the last output)?"""
    spec = subject.spec
    if not spec.per_position:
        return subject.not_applicable("needs an output per position")
    if spec.window not in (None, "full"):
        return subject.not_applicable("needs a model without window=; see horizon")
    exam = Examination.of(subject)
    length = exam.lengths[-1]
    if length < 3:
        return subject.not_applicable("needs at least 3 positions")
    if not (exam.is_measurable and exam.is_repeatable):
        return subject.not_applicable(NOT_REPEATED)
    sequence = exam.sequence(0, length)
    changed = sequence.expand(length, *sequence.shape).clone()
    index = torch.arange(length)
    changed[index, index] = exam.unlike(sequence, exam.filler(1, length)[0])
    answer = exam.answer(0, length)
    try:
        model = exam.model()
        outputs = torch.stack([subject.logits(model, row[None])[0] for row in changed])
    except refusals() as error:
        return subject.not_applicable(f"needs a model that takes other inputs: {reason_of(error)}")
    # The last output, or for a bidirectional model any output.
    reads_all = spec.causal and spec.visible is None
    read, which = (slice(-1, None), "the last output") if reads_all else (slice(None), "any output")
    rows = outputs[:, read]
    effects = relative_difference(answer[read].expand_as(rows), rows).flatten(1).amax(dim=1)
    without = (effects == 0).nonzero().flatten().tolist()
    if not without:
        return subject.passed(float(effects.min()), None)
    if selects_positions(subject):
        return subject.passed(
            float(len(without)),
            meaning="The model attends to a top k of positions, so that some have no effect.",
        )
    last = max(without)
    has_window = "the model has a window; if all layers have one, declare window="
    return subject.failed_unless(
        None if spec.window == "full" or spec.visible is not None else has_window,
        float(len(without)),
        0.0,
        where=f"input {last} of {length}",
        meaning=f"{len(without)} of {length} inputs have no effect on {which}. The last is input {last}.",
        advice=_ADVICE,
    )


@check
def argument_effect(subject: Subject) -> CheckResult:
    """Does every further number that forward gets, such as a time or a strength, have an effect?"""
    exam = Examination.of(subject)
    if not exam.is_repeatable:
        return subject.not_applicable(NOT_REPEATED)
    inputs, model = exam.plain_inputs, exam.model()
    names = _number_arguments(subject, model, inputs)
    if not names:
        return subject.not_applicable("needs a forward that gets further numbers")
    calls: list[Callable[[], object]] = [
        lambda: spec.logits(model.eval(), inputs.clone()),
        lambda: spec.loss_of(model.train(), inputs.clone()),
    ]
    spec, unused = exam.spec, list[str]()
    with torch.no_grad(), exam.precision():
        for name in names:
            try:
                if not any(_has_effect(subject, model, name, call) for call in calls):
                    unused.append(name)
            except refusals():  # the value may be out of range
                continue
    if not unused:
        return subject.passed(0.0, 0.0, meaning=f"arguments: {', '.join(names)}")
    return subject.failed(
        float(len(unused)),
        0.0,
        where=", ".join(unused),
        meaning="forward gets this number, and another value gives the same output and the same loss.",
        advice="Look for an argument that is not passed to the layers, and for a default that replaces it.",
    )


def _arguments(model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> BoundArguments:
    return signature(model.forward).bind(*args, **kwargs)


def _number_arguments(subject: Subject, model: nn.Module, inputs: Tensor) -> list[str]:
    """Return the names of the floating-point arguments of a call that are neither the inputs nor a mask."""
    names: list[str] = []

    def record(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        for name, value in _arguments(module, args, kwargs).arguments.items():
            is_input = isinstance(value, Tensor) and value.shape == inputs.shape
            if name not in names and not is_input and _is_number(value):
                names.append(name)

    with temporary_hooks([model.register_forward_pre_hook(record, with_kwargs=True)]), torch.no_grad():
        subject.spec.logits(model, inputs)
    return names


def _is_number(value: object) -> bool:
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.numel()):
        return isinstance(value, float)
    is_mask = ((value == 0) | (value == 1) | (value < _HIDDEN)).all()
    return not bool(is_mask)


def _has_effect(subject: Subject, model: nn.Module, name: str, call: Callable[[], object]) -> bool:
    """Return True if another value of an argument changes a result."""

    def change(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> tuple[object, dict[str, Any]]:
        bound = _arguments(module, args, kwargs)
        bound.arguments[name] = bound.arguments[name] * 0.7 + 0.1
        return bound.args, bound.kwargs

    with subject.fixed_randomness():
        plain = call()
    with (
        subject.fixed_randomness(),
        temporary_hooks([model.register_forward_pre_hook(change, with_kwargs=True)]),
    ):
        other = call()
    assert isinstance(plain, Tensor) and isinstance(other, Tensor)
    return not torch.equal(plain, other)


@check
def discarded_results(subject: Subject) -> CheckResult:
    """Is the result of every operation used?"""
    spec, inputs, model = subject.spec, subject.inputs(2), subject.model(train=True)
    has_labels = spec.labelled_loss is not None and spec.inputs == "tokens"
    results, unused = DiscardedResults(model), UnusedResults(model, has_loss=has_labels)
    kept = list[object]()
    handle = model.register_forward_hook(lambda _module, _args, output: kept.append(output))
    calls: list[Callable[[], object]] = [
        lambda: spec.loss_of(model.train(), inputs.clone()),
        lambda: spec.logits(model.eval(), inputs.clone()),
    ]
    if spec.masked is not None:
        keep = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
        calls.append(partial(spec.masked, model, inputs.clone(), keep))
    with subject.fixed_randomness(), torch.enable_grad(), temporary_hooks([handle]):
        for call in calls:
            with results.recording():
                kept.append(call())
        if has_labels:
            assert spec.labelled_loss is not None
            calls.append(partial(spec.labelled_loss, model.train(), inputs.clone(), inputs.clone()))
        for call in calls:
            with unused.recording():
                kept.append(call())
    found = results.found or unused.weights or results.unread or unused.numbers
    if not found:
        return subject.passed(0.0, 0.0)
    place, name = list(found.items())[-1]
    meaning = f"The tensor that {name} computes here is not used."
    if found is unused.weights:
        meaning = f"{name} applies a parameter here, and no output depends on the result."
    correct_if = "the result is only for debugging"
    if found is unused.weights and _has_options(model):
        correct_if = "an argument of the model that is not passed needs the result"
    is_certain = results.found or (found is unused.weights and not _has_options(model))
    return subject.failed_unless(
        None if is_certain else correct_if,
        float(len(found)),
        0.0,
        where=place,
        meaning=meaning,
        advice="Look for a variable that is overwritten before it is read, for masked_fill in place of "
        "masked_fill_, and for an auxiliary loss that is not added. Delete the statement if it is unused.",
    )


def _has_options(model: nn.Module) -> bool:
    """Return True if forward has arguments that are None, True or False by default."""
    return any(p.default is None or isinstance(p.default, bool) for p in forward_parameters(model).values())


@check
def text_after_padding_id(subject: Subject) -> CheckResult:
    """Does a text classifier read tokens after a padding id that the mask does not hide?"""
    spec = subject.spec
    if spec.per_position or spec.inputs != "tokens" or spec.masked is None:
        return subject.not_applicable("needs a text classifier with masked")
    exam = Examination.of(subject)
    token, length = padding_id(exam.base), exam.lengths[-1]
    if token is None or length < 3:
        return subject.not_applicable("needs the id of a padding token, and at least 3 positions")
    if not exam.is_repeatable:
        return subject.not_applicable(NOT_REPEATED)
    plain = exam.sequence(0, length)
    with_padding = plain.clone()
    with_padding[length // 2] = token
    keep = torch.ones(1, length, dtype=torch.bool, device=plain.device)

    def reads_last_token(text: Tensor) -> bool:
        """Return True if one of several other last tokens changes the output."""
        outputs = []
        for shift in range(_REPLACEMENTS):
            other = text.clone()
            inputs = real_inputs(subject, 1, length, shift=1000 + shift, model=exam.base)
            other[-1] = exam.unlike(text, inputs[0])[-1]
            outputs.append(execute(spec, exam.model(), Call(other[None], keep=keep)))
        return not all(torch.equal(outputs[0], each) for each in outputs)

    with torch.no_grad():
        if not reads_last_token(plain):
            return subject.not_applicable("needs a model whose output depends on the last token")
        if reads_last_token(with_padding):
            return subject.passed()
    return subject.failed(
        0.0,
        where=f"padding id {token} at position {length // 2} of {length}",
        meaning="The output does not depend on the last token if a padding id stands before it, although the "
        "mask hides no token. The end token is often also the padding token, and occurs within chats.",
        advice="Pool at the last token that the mask does not hide, or that is not the padding id.",
    )


@check
def mask_effect(subject: Subject) -> CheckResult:
    """Does a padding mask that hides a token change the output?"""
    spec = subject.spec
    if spec.masked is None:
        return subject.not_applicable(
            "needs masked: (model, inputs, keep) -> output, of a batch with padding"
        )
    exam = Examination.of(subject)
    inputs = exam.sequence(0, exam.lengths[-1])[None]
    if inputs.shape[1] < 2 or not exam.is_repeatable:
        return subject.not_applicable("needs at least 2 positions, and outputs that repeat themselves")
    keep = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    with torch.no_grad():
        plain = execute(spec, exam.model(), Call(inputs, keep=keep))
        places = [slice(hidden, hidden + 1) for hidden in range(inputs.shape[1] - 1)]
        if not spec.per_position:  # one position of less may give the same number of frames
            places.append(slice(inputs.shape[1] // 2, None))
        for hidden in places:
            partly = keep.clone()
            partly[:, hidden] = False
            try:
                output = execute(spec, exam.model(), Call(inputs, keep=partly))
            except refusals() as error:
                return subject.not_applicable(f"needs a mask with padding on the left: {reason_of(error)}")
            later = slice(hidden.stop, None) if spec.per_position else slice(None)
            if not torch.equal(plain[:, later], output[:, later]):
                return subject.passed()
    for_compatibility = (
        "the model is causal and padding is always on the right, or the argument exists for compatibility "
        "only; in both cases, declare masked=None"
    )
    return subject.failed_unless(
        # generate() pads on the left, but not the tokens of a decoder.
        None if can_generate(exam.base) and not isinstance(exam.base, Decoder) else for_compatibility,
        0.0,
        0.0,
        meaning="The model takes a padding mask and ignores it.",
        advice="Look for a mask that is not passed on to attention, or that another mask replaces.",
    )

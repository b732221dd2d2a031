"""Sensitivity: inputs that a position may see have an effect on its output."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.check import check
from stackwise.checks.engine.call import execute
from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call
from stackwise.checks.probe.batch import tensors_in
from stackwise.checks.probe.call import real_inputs, reason_of, refusals
from stackwise.checks.probe.difference import NOT_REPEATED, relative_difference
from stackwise.checks.probe.discarded import DiscardedResults
from stackwise.checks.probe.number_arguments import number_arguments, other_values, with_argument
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
    spec, inputs = exam.spec, exam.plain_inputs
    model = exam.model()
    with torch.no_grad(), exam.precision():
        numbers = number_arguments(model, lambda: spec.logits(model, inputs), inputs)
    unused = {name: value for name, value in numbers.items() if not _has_effect(exam, name, value)}
    if not numbers:
        return subject.not_applicable("needs a forward that gets further numbers, which are no mask")
    if not unused:
        return subject.passed(0.0, 0.0, meaning=f"arguments: {', '.join(numbers)}")
    only_options = all(isinstance(value, float) for value in unused.values())
    return subject.failed_unless(
        "it is a limit that these inputs do not reach, a probability, or belongs to an argument that is not "
        "passed"
        if only_options
        else None,
        float(len(unused)),
        0.0,
        where=", ".join(unused),
        meaning="Other values of these arguments give the same outputs, losses and gradients.",
        advice="Look for an argument that is not passed to the layers, and for a default that replaces it.",
    )


def _has_effect(exam: Examination, name: str, value: Any) -> bool:
    """Return True if another value of an argument changes a result, or if no other value is accepted."""
    is_measured = False
    for results in (_outputs, _gradients):
        try:
            plain = results(exam, None)
        except refusals():
            continue
        for other in other_values(value):
            try:
                found = results(exam, (name, other))
            except refusals():  # the value may be out of range
                continue
            is_measured = True
            if len(found) != len(plain) or not all(map(torch.equal, plain, found)):
                return True
    return not is_measured


def _outputs(exam: Examination, change: tuple[str, Any] | None) -> list[Tensor]:
    """Return all tensors in the output of the model in eval mode."""
    model, kept = exam.model().eval(), list[Tensor]()
    hook = model.register_forward_hook(lambda _module, _args, output: kept.extend(tensors_in(output)))
    replaced = nullcontext() if change is None else with_argument(model, *change)
    with (
        torch.no_grad(),
        exam.precision(),
        exam.subject.fixed_randomness(),
        temporary_hooks([hook]),
        replaced,
    ):
        logits = exam.spec.logits(model, exam.plain_inputs.clone())
    return [logits, *kept]


def _gradients(exam: Examination, change: tuple[str, Any] | None) -> list[Tensor]:
    """Return the losses in train mode, and their gradients."""
    model, spec, inputs = exam.model().train(), exam.spec, exam.plain_inputs
    replaced = nullcontext() if change is None else with_argument(model, *change)
    with torch.enable_grad(), exam.precision(), exam.subject.fixed_randomness(), replaced:
        losses = [spec.loss_of(model, inputs.clone())]
        if spec.labelled_loss is not None and spec.inputs == "tokens":
            losses.append(spec.labelled_loss(model, inputs.clone(), inputs.clone()))
        total = torch.stack([loss.double() for loss in losses]).sum()
        weights = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(total, weights, allow_unused=True)
    return [*(loss.detach() for loss in losses), *(g for g in gradients if g is not None)]


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

"""Sensitivity: inputs that a position may see have an effect on its output."""

from __future__ import annotations

import torch

from stackwise.checks.check import check
from stackwise.checks.engine.examination import Examination
from stackwise.checks.probe.difference import NOT_REPEATED, relative_difference
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

_ADVICE = (
    "Look for a window that is applied although it is switched off, a mask that hides too much, and a state "
    "that is overwritten."
)


@check
def token_effect(subject: Subject) -> CheckResult:
    """Does every input have an effect on the last output?"""
    spec = subject.spec
    if not spec.per_position:
        return subject.not_applicable("needs an output per position")
    if spec.visible is not None or spec.window is not None:
        return subject.not_applicable(
            "needs a model without visible= and window=; see hidden_tokens and horizon"
        )
    exam = Examination(subject)
    length = exam.lengths[-1]
    if length < 3:
        return subject.not_applicable("needs at least 3 positions")
    if not exam.is_repeatable:
        return subject.not_applicable(NOT_REPEATED)
    sequence = exam.sequence(0, length)
    changed = sequence[None].repeat(length, *(1 for _ in sequence.shape))
    other = exam.filler(1, length)[0]
    index = torch.arange(length)
    changed[index, index] = other
    if not sequence.is_floating_point():
        same = other == sequence
        changed[index, index] = torch.where(same, (other + 1) % spec.width, other)
    answer = exam.answer(0, length)
    outputs = torch.stack([subject.logits(exam.model(), row[None])[0] for row in changed])
    # The last output, or for a bidirectional model any output.
    rows = outputs[:, -1:] if spec.causal else outputs
    expected = answer[-1:] if spec.causal else answer
    effects = (
        relative_difference(expected.expand_as(rows[0])[None].expand_as(rows), rows).flatten(1).amax(dim=1)
    )
    without = (effects == 0).nonzero().flatten().tolist()
    if not without:
        return subject.passed(float(effects.min()), None)
    last = max(without)
    return subject.warned(
        float(len(without)),
        0.0,
        where=f"input {last} of {length}",
        meaning=f"{len(without)} inputs, the last one {length - 1 - last} positions before the end, have no "
        "effect on the last output, and no window is declared.",
        correct_if="the model has a window, or reads selected inputs only; if all layers have one, declare "
        "window=",
        advice=_ADVICE,
    )

"""Modes: train mode after eval mode, and causality in train mode, half precision and the model's own dtype.

The variation `later_tokens` compares in eval mode and in float64.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from stackwise.checks.check import check
from stackwise.checks.engine.examination import HALF_PRECISION, Examination
from stackwise.checks.probe.call import dtype_of, reason_of, refusals
from stackwise.checks.probe.difference import relative_difference, same_bits
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

# Largest difference in eps of the dtype, of float32 and of half precision. A router changes the order of sums
# if it sends tokens elsewhere.
_LIMIT, _HALF_LIMIT = 16.0, 1.0


@check
def mode_switch(subject: Subject) -> CheckResult:
    """Is the output in train mode the same before and after a call in eval mode, with the same randomness?"""
    inputs, model = subject.inputs(2), subject.model(train=True)
    try:
        first, before = (subject.logits(model, inputs) for _ in range(2))
        model.eval()
        subject.logits(model, inputs)
        model.train()
        after = subject.logits(model, inputs)
    except refusals() as error:
        return subject.not_applicable(f"needs a model that runs in train mode: {reason_of(error)}")
    limit = _LIMIT * torch.finfo(before.dtype).eps
    if not relative_difference(first, before).max() <= limit:
        return subject.not_applicable("needs a model that repeats its output with the same random numbers")
    gap = float(relative_difference(before, after).max())
    if gap <= limit:
        return subject.passed(gap, limit)
    return subject.failed(
        gap,
        limit,
        meaning="The output in train mode changes after a call in eval mode.",
        advice="Look for a setting that eval mode overwrites and train mode does not restore, such as a "
        "dropout rate of 0.",
    )


@check
def causality_modes(subject: Subject) -> CheckResult:
    """In its own dtype, in train mode and in half precision: is each output independent of later tokens?"""
    if not subject.spec.causal or not subject.spec.per_position:
        return subject.not_applicable("needs a causal model with an output per position")
    own = Examination.of(subject).in_dtype("own")
    if own.longest < 2:
        return subject.not_applicable("needs at least 2 positions")
    found, narrow = [], [own.in_dtype(dtype) for dtype in HALF_PRECISION]
    for exam, train in ((own, False), (own, True), *((each, False) for each in narrow if each.is_finite)):
        first = exam.longest - max(1, exam.longest // 3)
        try:
            gaps = _effect_of_later_tokens(exam, first, train=train)
        except refusals():
            if not train:
                raise
            continue  # train mode needs more, such as labels
        narrowest = torch.bfloat16 if exam.dtype == "autocast" else dtype_of(exam.base)
        limit = (_LIMIT if exam.compares_values else _HALF_LIMIT) * torch.finfo(narrowest).eps
        if float(gaps.max()) <= limit:
            found.append(float(gaps.max()) / limit)
        elif exam is own and not train and own.is_repeatable:
            return subject.not_applicable("causality fails, and explains the difference")
        else:
            return _reads_later_tokens(exam, first, gaps, limit, train=train)
    return subject.passed(max(found), 1.0, meaning="share of the limit")


def _reads_later_tokens(
    exam: Examination, first: int, gaps: Tensor, limit: float, *, train: bool
) -> CheckResult:
    by_statistics = "the model uses statistics over all positions of a batch in train mode on purpose"
    dtype = "autocast" if exam.dtype == "autocast" else str(dtype_of(exam.base)).removeprefix("torch.")
    return exam.subject.failed_unless(
        by_statistics if train and _updates_statistics(exam) else None,
        float(gaps.max()),
        limit,
        where=f"position {int(gaps.argmax())}, {'train' if train else 'eval'} mode, {dtype}",
        meaning=f"The output changes if the tokens from {first} on are replaced.",
        advice="Look for statistics over positions that only train mode computes, such as those of a "
        "batch norm, and for a kernel without the causal mask that only half precision uses.",
    )


def _effect_of_later_tokens(exam: Examination, first: int, *, train: bool) -> Tensor:
    """Return the change of each output before `first` if the tokens from there on are replaced."""
    sequence = exam.sequence(0, exam.longest)
    changed = sequence.clone()
    changed[first:] = exam.unlike(sequence, exam.filler(1, exam.longest)[0])[first:]
    with WithoutDropout() if train else nullcontext(), exam.precision():
        one, two = (exam.subject.logits(exam.model().train(train), x[None])[0] for x in (sequence, changed))
    return relative_difference(one[:first], two[:first]).amax(dim=-1)


def _updates_statistics(exam: Examination) -> bool:
    """Return True if a call in train mode changes floating-point buffers, such as those of a batch norm."""
    model = exam.model().train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    with torch.no_grad(), WithoutDropout():
        exam.spec.logits(model, exam.sequence(0, exam.longest)[None])
    return any(name in before and not same_bits(b, before[name]) for name, b in model.named_buffers())

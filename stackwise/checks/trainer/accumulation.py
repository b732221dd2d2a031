"""Accumulation: several micro-batches give the gradient of one batch with all their rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from stackwise.checks.probe.applicable import needed, trainer_check
from stackwise.checks.probe.batch import joined, rows_of, tensors_in
from stackwise.checks.probe.call import REFUSALS
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.probe.update import distance, norm, observed
from stackwise.checks.result import CheckResult
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import labels_in, with_labels

_ROWS = 2
_MICRO_BATCHES = 3
_EXACT = 1e-5
_ROUNDINGS = 16.0
# Gradients are multiplied by this factor, so that their norm is below the limit of clipping.
_SHRUNK = 1e-3
_PARALLEL = 1e-3
_EXPLAINED = 0.1
# Largest difference between the gradients of one batch in two orders of its rows.
_LARGEST_NOISE = 1e-2
# Steps in which a row must have no effect. If a step selects half of its rows at random, one of three rows is
# in none of these steps in 3 of 1,000 runs.
_SELECTIONS = 10


@trainer_check
def accumulated_gradient(subject: TrainerSubject) -> CheckResult:
    """Do several micro-batches, or fewer at the end of an epoch, give the gradient of the full batch?"""
    micro_batches = _micro_batches(subject)
    counts = (_MICRO_BATCHES, _MICRO_BATCHES - 1)
    return _first_finding(subject, {f"an update from {n} micro-batches": micro_batches[:n] for n in counts})


@trainer_check
def accumulation_ragged(subject: TrainerSubject) -> CheckResult:
    """Do micro-batches with many, few and no targets give the gradient of the full batch?"""
    many, second, third = _micro_batches(subject)
    labels = needed(labels_in(second), "batches with labels")
    ignored = needed(subject.spec.ignored_label, "ignored_label, the label of positions without a target")
    labels = labels.clone()
    labels[1:] = ignored
    labels[:1, :-2] = ignored
    few, none = with_labels(second, labels), with_labels(third, torch.full_like(labels, ignored))
    cases = {
        "micro-batches with many and few targets": [many, few],
        "micro-batches with many, few and no targets": [many, few, none],
    }
    return _first_finding(subject, cases)


@trainer_check
def row_effects(subject: TrainerSubject) -> CheckResult:
    """Does each row of a batch have an effect on the gradient of its step?"""
    rows = subject.spec.batch_size
    needed(rows > 1, "a batch_size of at least 2")
    places = {0, rows // 2, rows - 1}
    without = places
    # A step may select rows by their loss or at random. Then other rows have no effect in another step.
    for number in range(_SELECTIONS):
        if without:
            without = without & _without_effect(subject, number, sorted(without))
    needed(without != places, "a step that reads the rows of its batch")
    if not without:
        return subject.passed(0.0, 0.0)
    return subject.failed_unless(
        "the step omits the rest of a batch that does not fill its micro-batches"
        if without == {rows - 1}
        else None,
        float(len(without)),
        0.0,
        where=f"rows {', '.join(map(str, sorted(without)))} of {rows}",
        meaning="The gradient of the update is the same if one of these rows is replaced by another row.",
        advice="Call zero_grad() once per update, not once per micro-batch, and use all micro-batches.",
    )


def _without_effect(subject: TrainerSubject, number: int, places: list[int]) -> set[int]:
    """Return the rows of a batch whose content does not change the gradient."""
    need = "an update in each step, and rows that differ"
    rows, batch, other = subject.spec.batch_size, subject.batch(2 * number), subject.batch(2 * number + 1)
    single = [[rows_of(each, rows, slice(row, row + 1)) for row in range(rows)] for each in (batch, other)]
    reference, _ = _gradient(subject, batch, seed=number)
    needed(reference, need)
    without = set()
    for place in places:
        pairs = zip(tensors_in(single[0][place]), tensors_in(single[1][place]), strict=True)
        needed(any(not torch.equal(one, two) for one, two in pairs), need)
        changed = joined([*single[0][:place], single[1][place], *single[0][place + 1 :]], 1)
        if distance(_gradient(subject, changed, seed=number)[0], reference) == 0:
            without.add(place)
    return without


def _first_finding(subject: TrainerSubject, cases: dict[str, list[Any]]) -> CheckResult:
    """Return the result of the first micro-batches with a finding, or of the last ones."""
    for where, micro_batches in cases.items():
        result = _compared(subject, micro_batches, where)
        if result.status != "passed":
            break
    return result


def _compared(subject: TrainerSubject, micro_batches: list[Any], where: str) -> CheckResult:
    """Compare the gradient of micro-batches with that of the full batch."""
    whole, rows = joined(micro_batches, _ROWS), len(micro_batches) * _ROWS
    reference, _ = _gradient(subject, whole)
    reversed_rows, _ = _gradient(subject, rows_of(whole, rows, torch.arange(rows - 1, -1, -1)))
    parts, updates = _gradient(subject, micro_batches, accumulated=True)
    if updates != 1:
        return subject.failed(
            updates,
            1.0,
            where=where,
            meaning=f"The run makes {updates} updates instead of one.",
            advice="Call optimizer.step() only after the last micro-batch of an update.",
        )
    noise, value = distance(reversed_rows, reference), distance(parts, reference)
    needed(noise <= _LARGEST_NOISE, "a step whose gradient does not depend on the order of the rows")
    limit = max(_EXACT, _ROUNDINGS * noise)
    if value <= limit:
        return subject.passed(value, limit)
    ratio = norm(parts.values()) / (norm(reference.values()) or math.nan)
    scaled = {name: ratio * g.double() for name, g in reference.items()}
    correct_if = None
    advice = "Divide the loss only once, by the actual number of micro-batches of the update."
    if "targets" in where:
        advice = (
            "Divide the sum of the losses by the number of targets of all micro-batches of the update, not "
            "each loss by the number of targets of its micro-batch."
        )
        if subject.averages_batches(subject.run(), "accumulate"):
            correct_if = (
                "each micro-batch has the same weight on purpose: this trainer divides each loss by the "
                "number of micro-batches"
            )
    if not _adds_up(subject, value):
        correct_if = (
            "the loss of a batch is not the mean of the losses of its parts, as with batch statistics, a "
            "contrastive loss or a routing loss"
        )
        advice = "Look for state that one micro-batch leaves for the next one."
    return subject.failed_unless(
        correct_if,
        value,
        limit,
        where=where,
        meaning=f"The gradient is {ratio:.3g} times that of the full batch."
        if ratio > 0 and distance(parts, scaled) <= max(_PARALLEL, limit)
        else "The gradient differs from that of the full batch, and not only by a factor.",
        advice=advice,
    )


def _adds_up(subject: TrainerSubject, value: float) -> bool:
    """Return True if the gradient of a batch is the mean of those of its parts in separate steps.

    The mean may differ from the gradient by a small fraction of `value`, the error of the accumulation.
    """
    micro_batches = _micro_batches(subject)
    whole, _ = _gradient(subject, joined(micro_batches, _ROWS))
    mean: dict[str, Tensor] = {}
    for batch in micro_batches:
        part, _ = _gradient(subject, batch)
        for name, g in part.items():
            mean[name] = mean.get(name, torch.zeros_like(g)) + g / len(micro_batches)
    return distance(mean, whole) <= _EXPLAINED * value


def _micro_batches(subject: TrainerSubject) -> list[Any]:
    needed(subject.has(subject.run(), "accumulate"), "accumulate(batches)")
    rows = _MICRO_BATCHES * _ROWS
    batch = subject.batch(batch_size=rows)
    return [rows_of(batch, rows, slice(start, start + _ROWS)) for start in range(0, rows, _ROWS)]


def _gradient(
    subject: TrainerSubject, batch: Any, *, accumulated: bool = False, seed: int = 0
) -> tuple[dict[str, Tensor], int]:
    """Return the gradient at the optimizer, in float64 if the run supports it, and the number of updates."""
    for dtype in (torch.float64, None):
        run: Any = subject.run()
        if dtype is not None:
            run.model.to(dtype)
        try:
            with WithoutDropout(), subject.under_seed(seed), observed(run, factor=_SHRUNK) as seen:
                (run.accumulate if accumulated else run.step)(batch)
        except REFUSALS:
            if dtype is None:
                raise
            continue
        break
    gradients = seen.updates[-1].gradients if seen.updates else {}
    return gradients, len(seen.updates)

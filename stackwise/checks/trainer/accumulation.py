"""Accumulation: several micro-batches give the gradient of one batch with all their rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stackwise.checks.check import trainer_check
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
_NEEDS_ORDER = "needs a step whose gradient does not depend on the order of the rows"
_NEEDS = "needs accumulate(batches)"


@dataclass(frozen=True)
class _Comparison:
    """Gradient of micro-batches, compared with that of the full batch.

    Attributes:
        value: distance of the two, relative to the norm of the second.
        limit: largest distance that rounding may cause.
        ratio: ratio of their norms.
        noise: difference between the gradients of the full batch in two orders of its rows.
        parallel: True if they differ by a factor only.
        updates: number of updates during the accumulation.
    """

    value: float
    limit: float
    noise: float
    ratio: float
    parallel: bool
    updates: int

    @property
    def differs(self) -> bool:
        """Return True if the difference is larger than rounding."""
        return not self.value <= self.limit


@trainer_check
def accumulated_gradient(subject: TrainerSubject) -> CheckResult:
    """Do several micro-batches, or fewer at the end of an epoch, give the gradient of the full batch?"""
    if not subject.has(subject.run(), "accumulate"):
        return subject.not_applicable(_NEEDS)
    micro_batches = _micro_batches(subject)
    results = [
        _judged(subject, _compared(subject, micro_batches[:n]), f"an update from {n} micro-batches")
        for n in (_MICRO_BATCHES, _MICRO_BATCHES - 1)
    ]
    return next((each for each in results if each.status != "passed"), results[0])


@trainer_check
def accumulation_ragged(subject: TrainerSubject) -> CheckResult:
    """Do micro-batches with many, few and no targets give the gradient of the full batch?"""
    if not subject.has(subject.run(), "accumulate"):
        return subject.not_applicable(_NEEDS)
    micro_batches = _micro_batches(subject)
    if (labels := labels_in(micro_batches[1])) is None:
        return subject.not_applicable("needs batches with labels")
    if (ignored := subject.spec.ignored_label) is None:
        return subject.not_applicable("needs ignored_label, the label of positions without a target")
    few = labels.clone()
    few[1:] = ignored
    few[:1, :-2] = ignored
    none = torch.full_like(few, ignored)
    ragged = [micro_batches[0], with_labels(micro_batches[1], few)]
    for where, parts in (
        ("micro-batches with many and few targets", ragged),
        ("micro-batches with many, few and no targets", [*ragged, with_labels(micro_batches[2], none)]),
    ):
        compared = _compared(subject, parts)
        if compared.differs or compared.updates != 1 or compared.noise > _LARGEST_NOISE:
            return _judged(subject, compared, where)
    return subject.passed(compared.value, compared.limit)


@trainer_check
def row_effects(subject: TrainerSubject) -> CheckResult:
    """Does each row of a batch have an effect on the gradient of its step?"""
    rows = subject.spec.batch_size
    if rows < 2:
        return subject.not_applicable("needs a batch_size of at least 2")
    places = {0, rows // 2, rows - 1}
    without = places
    # A step may select rows by their loss or at random. Then other rows have no effect in another step.
    for number in range(_SELECTIONS):
        if without:
            found = _without_effect(subject, number, sorted(without))
            if found is None:
                return subject.not_applicable("needs an update in each step, and rows that differ")
            without = without & found
    if without == places:
        return subject.not_applicable("needs a step that reads the rows of its batch")
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


def _without_effect(subject: TrainerSubject, number: int, places: list[int]) -> set[int] | None:
    """Return the rows of a batch whose content does not change the gradient. None: it is not known."""
    rows, batch, other = subject.spec.batch_size, subject.batch(2 * number), subject.batch(2 * number + 1)
    single = [[rows_of(each, rows, slice(row, row + 1)) for row in range(rows)] for each in (batch, other)]
    reference, _ = _gradient(subject, batch, seed=number)
    if not reference:
        return None
    without = set()
    for place in places:
        pairs = zip(tensors_in(single[0][place]), tensors_in(single[1][place]), strict=True)
        if all(torch.equal(one, two) for one, two in pairs):
            return None
        changed = joined([*single[0][:place], single[1][place], *single[0][place + 1 :]], 1)
        if distance(_gradient(subject, changed, seed=number)[0], reference) == 0:
            without.add(place)
    return without


def _judged(subject: TrainerSubject, compared: _Comparison, where: str) -> CheckResult:
    if compared.updates != 1:
        return subject.failed(
            compared.updates,
            1.0,
            where=where,
            meaning=f"The run makes {compared.updates} updates instead of one.",
            advice="Call optimizer.step() only after the last micro-batch of an update.",
        )
    if compared.noise > _LARGEST_NOISE:
        return subject.not_applicable(_NEEDS_ORDER)
    if not compared.differs:
        return subject.passed(compared.value, compared.limit)
    meaning = f"The gradient is {compared.ratio:.3g} times that of the full batch."
    if not compared.parallel:
        meaning = "The gradient differs from that of the full batch, and not only by a factor."
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
    if not _adds_up(subject, compared.value):
        correct_if = (
            "the loss of a batch is not the mean of the losses of its parts, as with batch statistics, a "
            "contrastive loss or a routing loss"
        )
        advice = "Look for state that one micro-batch leaves for the next one."
    return subject.failed_unless(
        correct_if, compared.value, compared.limit, where=where, meaning=meaning, advice=advice
    )


def _adds_up(subject: TrainerSubject, value: float) -> bool:
    """Return True if the gradient of a batch is the mean of the gradients of its parts in separate steps.

    Args:
        value: relative error of the accumulation. The mean may differ from the gradient by a small fraction
            of this error.
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
    rows = _MICRO_BATCHES * _ROWS
    batch = subject.batch(batch_size=rows)
    return [rows_of(batch, rows, slice(start, start + _ROWS)) for start in range(0, rows, _ROWS)]


def _compared(subject: TrainerSubject, micro_batches: list[Any]) -> _Comparison:
    whole = joined(micro_batches, _ROWS)
    rows = len(micro_batches) * _ROWS
    reference, _ = _gradient(subject, whole)
    reversed_rows, _ = _gradient(subject, rows_of(whole, rows, torch.arange(rows - 1, -1, -1)))
    parts, updates = _gradient(subject, micro_batches, accumulated=True)
    noise = distance(reversed_rows, reference)
    value, size = distance(parts, reference), norm(reference.values())
    ratio = norm(parts.values()) / size if size > 0 else math.inf
    limit = max(_EXACT, _ROUNDINGS * noise)
    scaled = {name: ratio * g.double() for name, g in reference.items()}
    parallel = ratio > 0 and distance(parts, scaled) <= max(_PARALLEL, limit)
    return _Comparison(value, limit, noise, ratio, parallel, updates)


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

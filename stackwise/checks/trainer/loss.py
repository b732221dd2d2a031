"""Loss: the loss of a step depends on the targets, and on no ignored position."""

from __future__ import annotations

import math
from typing import Any

import torch

from stackwise.checks.probe.applicable import needed, trainer_check
from stackwise.checks.probe.batch import named_tensors, rows_of
from stackwise.checks.probe.call import reason_of
from stackwise.checks.probe.derivative import compared
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.probe.run_state import number_in
from stackwise.checks.result import CheckResult
from stackwise.checks.trainer.evaluation import exact_loss, padding_label, relative_gap, rounding_of
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import labels_in, with_labels
from stackwise.support.system_errors import reraise_if_out_of_memory

_ROWS = 4
# Largest relative difference of two losses, one of which may be computed under autocast.
_SAME_RATIO = 5e-3


@trainer_check
def ignored_targets(subject: TrainerSubject) -> CheckResult:
    """Is the loss of a batch with ignored rows equal to the loss of its other rows?"""
    batch = subject.batch(batch_size=_ROWS)
    labels = needed(labels_in(batch), "batches with labels")
    ignored = needed(subject.spec.ignored_label, "ignored_label, the label of positions without a target")
    is_integer = not labels.is_floating_point() and len(labels) == _ROWS
    needed(is_integer, f"integer labels, one row of them for each of {_ROWS} rows")

    def loss_with(label: int) -> float:
        """Return the loss of the batch with a label in half of its rows."""
        changed = labels.clone()
        changed[_ROWS // 2 :] = label
        return _loss(subject, with_labels(batch, changed))

    whole, kept = _loss(subject, batch), _loss(subject, rows_of(batch, _ROWS, slice(_ROWS // 2)))
    found = loss_with(ignored)
    limit = rounding_of(subject.run())
    needed(relative_gap(whole, kept) > limit, "a loss that differs from row to row")
    value = relative_gap(found, kept)
    if value <= limit:
        return subject.passed(value, limit)
    is_read = relative_gap(found, whole) > limit
    needed(is_read, "a step that reads labels: its loss does not depend on them")
    ends = (0, subject.spec.vocab_size - 1)
    token = next((k for k in ends if relative_gap(loss_with(k), found) <= limit), None)
    is_explained = token is not None or relative_gap(found, kept / 2) <= limit
    needed(is_explained, "a loss that depends on targets only")
    return subject.failed(
        value,
        limit,
        where=f"labels of {ignored}",
        meaning=f"The loss treats ignored targets as token {token}."
        if token is not None
        else f"The loss is {found:.6g}, and {kept:.6g} without ignored targets, so they are counted.",
        advice="Pass the unchanged labels and their ignore_index to cross_entropy (no clamp, no remainder), "
        "and divide a sum by the number of targets that are not ignored.",
    )


@trainer_check
def loss_derivative(subject: TrainerSubject) -> CheckResult:
    """In train mode with dropout, is the gradient of loss(batch) equal to finite differences?"""
    run: Any = subject.run()
    needed(subject.has(run, "loss"), "loss(batch)")
    try:
        model = run.model.double().train()
        found = compared(subject, model, lambda _: run.loss(subject.batch()))
    except Exception as error:  # the loss does not run in float64
        reraise_if_out_of_memory(error)
        return subject.not_applicable(f"needs a loss in float64: {reason_of(error)}")
    is_comparable = found.has_gradient and found.is_smooth and not (found.uses_steps or found.truncates)
    needed(is_comparable, "a loss with a gradient, and without step functions")
    if found.value <= found.limit:
        return subject.passed(found.value, found.limit)
    try:
        with WithoutDropout():
            plain = compared(subject, model, lambda _: run.loss(subject.batch()))
        is_detached = plain.value > plain.limit
    except Exception as error:  # recomputation in the backward pass is outside of the context
        reraise_if_out_of_memory(error)
        is_detached = False
    needed(not is_detached, "a loss without detached parts, such as detached targets")
    name, slope, measured = found.wrong[0] if found.wrong else ("all parameters together", math.nan, math.nan)
    return subject.failed(
        found.value,
        found.limit,
        where=f"{name}: gradient {slope:.3g}, finite differences {measured:.3g}",
        meaning="With dropout, the gradient differs from finite differences along a random direction.",
        advice="Look for recomputation that draws different dropout masks (preserve_rng_state), and a "
        "backward function that does not use the mask of the forward pass.",
    )


@trainer_check
def loss_divisor(subject: TrainerSubject) -> CheckResult:
    """Is the loss of a batch divided by its number of targets, and not by a different number?"""
    ratios = []
    batches = [subject.batch(number) for number in range(2)]
    need = "batches with input_ids and labels, a model that gives logits, and a loss"
    for batch in batches:
        with WithoutDropout():
            exact = exact_loss(subject.run(), [batch], subject.spec.ignored_label) or 0.0
        needed(exact != 0 and math.isfinite(exact), need)
        ratios.append(_loss(subject, batch, need) / exact)
    limit = max(rounding_of(subject.run()), _SAME_RATIO)
    value = relative_gap(ratios[0], 1.0)
    if value <= limit:
        return subject.passed(value, limit)
    is_multiple = relative_gap(ratios[1], ratios[0]) <= limit
    needed(is_multiple, "a loss that is a multiple of the mean over all targets")
    n_targets = int(batches[0]["labels"][:, 1:].ne(padding_label(subject.spec.ignored_label)).sum())
    divisor = n_targets / ratios[0]
    numbers = {name: int(tensor) for name, tensor in named_tensors(batches[0]) if tensor.numel() == 1}
    near = (name for name, number in numbers.items() if abs(number - divisor) <= limit * divisor)
    name = needed(next(near, None), "a loss that is divided by a number in the batch")
    return subject.failed(
        value,
        limit,
        where=f"batch[{name!r}]",
        meaning=f"The loss is divided by {numbers[name]}, and the batch has {n_targets} targets.",
        advice="Divide a sum by the number of targets in the batches of this update: clipping and the "
        "epsilon of the optimizer depend on the size of the gradient.",
    )


def _loss(
    subject: TrainerSubject, batch: Any, need: str = "loss(batch), or a step that returns its loss"
) -> float:
    """Return `loss(batch)` of a new run without dropout, or the result of a step."""
    run: Any = subject.run()
    run.model.train()
    with subject.fixed_randomness(), WithoutDropout():
        if not subject.has(run, "loss"):
            return needed(number_in(run.step(batch)), need)
        with torch.no_grad():
            return needed(number_in(run.loss(batch)), need)

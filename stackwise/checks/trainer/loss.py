"""Loss: the loss of a step depends on the targets, and on no ignored position."""

from __future__ import annotations

import math
from typing import Any

import torch

from stackwise.checks.check import trainer_check
from stackwise.checks.probe.batch import named_tensors, rows_of
from stackwise.checks.probe.call import reason_of
from stackwise.checks.probe.derivative import compared
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.probe.run_state import number_in
from stackwise.checks.result import CheckResult
from stackwise.checks.trainer.evaluation import exact_loss
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import labels_in, with_labels
from stackwise.support.system_errors import reraise_if_out_of_memory

_ROWS = 4
# Label for padding if no label is ignored. No token has it.
_NO_LABEL = -100
# Rounding of losses in float32, and of their mean in half precision.
_EXACT, _NARROW = 1e-5, 1e-2
# Largest relative difference of two losses, one of which may be computed under autocast.
_SAME_RATIO = 5e-3


@trainer_check
def ignored_targets(subject: TrainerSubject) -> CheckResult:
    """Is the loss of a batch with ignored rows equal to the loss of its other rows?"""
    batch = subject.batch(batch_size=_ROWS)
    if (labels := labels_in(batch)) is None:
        return subject.not_applicable("needs batches with labels")
    if (ignored := subject.spec.ignored_label) is None:
        return subject.not_applicable("needs ignored_label, the label of positions without a target")
    if labels.is_floating_point() or len(labels) != _ROWS:
        return subject.not_applicable(f"needs integer labels, one row of them for each of {_ROWS} rows")

    def relabelled(label: int) -> Any:
        changed = labels.clone()
        changed[_ROWS // 2 :] = label
        return with_labels(batch, changed)

    whole, kept = _loss(subject, batch), _loss(subject, rows_of(batch, _ROWS, slice(_ROWS // 2)))
    found = _loss(subject, relabelled(ignored))
    if whole is None or kept is None or found is None:
        return subject.not_applicable("needs loss(batch), or a step that returns its loss")
    limit = _limit(subject)
    if _apart(whole, kept) <= limit:
        return subject.not_applicable("needs a loss that differs from row to row")
    value = _apart(found, kept)
    if value <= limit:
        return subject.passed(value, limit)
    if _apart(found, whole) <= limit:
        return subject.not_applicable("needs a step that reads labels: its loss does not depend on them")
    tokens = [
        k for k in (0, subject.spec.vocab_size - 1) if _close(_loss(subject, relabelled(k)), found, limit)
    ]
    is_counted = _apart(found, kept / 2) <= limit
    if not tokens and not is_counted:
        return subject.not_applicable("needs a loss that depends on targets only")
    return subject.failed(
        value,
        limit,
        where=f"labels of {ignored}",
        meaning=f"The loss treats ignored targets as token {tokens[0]}."
        if tokens
        else f"The loss is {found:.6g}, and {kept:.6g} without ignored targets, so they are counted.",
        advice="Pass the unchanged labels and their ignore_index to cross_entropy (no clamp, no remainder), "
        "and divide a sum by the number of targets that are not ignored.",
    )


@trainer_check
def loss_derivative(subject: TrainerSubject) -> CheckResult:
    """In train mode with dropout, is the gradient of loss(batch) equal to finite differences?"""
    run: Any = subject.run()
    if not subject.has(run, "loss"):
        return subject.not_applicable("needs loss(batch)")
    try:
        model = run.model.double().train()
        found = compared(subject, model, lambda _: run.loss(subject.batch()))
    except Exception as error:  # the loss does not run in float64
        reraise_if_out_of_memory(error)
        return subject.not_applicable(f"needs a loss in float64: {reason_of(error)}")
    if not found.has_gradient or not found.is_smooth or found.uses_steps or found.truncates:
        return subject.not_applicable("needs a loss with a gradient, and without step functions")
    if found.value <= found.limit:
        return subject.passed(found.value, found.limit)
    try:
        with WithoutDropout():
            plain = compared(subject, model, lambda _: run.loss(subject.batch()))
        is_detached = plain.value > plain.limit
    except Exception as error:  # recomputation in the backward pass is outside of the context
        reraise_if_out_of_memory(error)
        is_detached = False
    if is_detached:
        return subject.not_applicable("needs a loss without detached parts, such as detached targets")
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
    ratios, exact = [], 0.0
    batches = [subject.batch(number) for number in range(2)]
    for batch in batches:
        run = subject.run()
        with WithoutDropout():
            exact = exact_loss(run, [batch], subject.spec.ignored_label) or 0.0
        loss = _loss(subject, batch)
        if not exact or not math.isfinite(exact) or loss is None:
            return subject.not_applicable(
                "needs batches with input_ids and labels, a model that gives logits, and a loss"
            )
        ratios.append(loss / exact)
    limit = max(_limit(subject), _SAME_RATIO)
    value = _apart(ratios[0], 1.0)
    if value <= limit:
        return subject.passed(value, limit)
    if _apart(ratios[1], ratios[0]) > limit:
        return subject.not_applicable("needs a loss that is a multiple of the mean over all targets")
    labels = labels_in(batches[0])
    assert labels is not None
    ignored = subject.spec.ignored_label
    n_targets = int(labels[:, 1:].ne(_NO_LABEL if ignored is None else ignored).sum())
    divisor = n_targets / ratios[0]
    numbers = {name: int(tensor) for name, tensor in named_tensors(batches[0]) if tensor.numel() == 1}
    name = next((name for name, number in numbers.items() if abs(number - divisor) <= limit * divisor), "")
    if not name:
        return subject.not_applicable("needs a loss that is divided by a number in the batch")
    return subject.failed(
        value,
        limit,
        where=f"batch[{name!r}]",
        meaning=f"The loss is divided by {numbers[name]}, and the batch has {n_targets} targets.",
        advice="Divide a sum by the number of targets in the batches of this update: clipping and the "
        "epsilon of the optimizer depend on the size of the gradient.",
    )


def _loss(subject: TrainerSubject, batch: Any) -> float | None:
    """Return `loss(batch)` of a new run without dropout, or the result of a step."""
    run = subject.run()
    run.model.train()
    with subject.fixed_randomness(), WithoutDropout():
        if subject.has(run, "loss"):
            with torch.no_grad():
                return number_in(run.loss(batch))  # type: ignore[attr-defined]
        return number_in(run.step(batch))


def _apart(found: float, wanted: float) -> float:
    return abs(found - wanted) / max(abs(wanted), 1e-12)


def _close(found: float | None, wanted: float, limit: float) -> bool:
    return found is not None and _apart(found, wanted) <= limit


def _limit(subject: TrainerSubject) -> float:
    run = subject.run()
    narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in run.model.parameters())
    return _NARROW if narrow else _EXACT

"""Clipping: the gradient at the optimizer has at most the declared norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from stackwise.checks.probe.applicable import needed, trainer_check
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.probe.update import Observation, distance, norm, observed, train
from stackwise.checks.result import CheckResult
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import TrainingRun

_ABOVE = 20.0
_BELOW = 0.1
_ROUNDING = {torch.bfloat16: 0.02, torch.float16: 0.005}
_EXACT = 1e-3
_SCALES = 64.0
_AMPLIFIED = 1e3
_MICRO_BATCHES = 3
_TURNED = 0.01


@trainer_check
def clipped_norm(subject: TrainerSubject) -> CheckResult:
    """Does clipping limit the gradient to the declared norm, and leave smaller gradients unchanged?"""
    max_norm = needed(subject.spec.max_norm, "max_norm, the norm to which the step clips")
    (seen, run), (small, _) = _scaled(subject, (_ABOVE * max_norm, _BELOW * max_norm))
    gradients, tolerance = seen.updates[0].gradients, _tolerance(run)
    value, limit = norm(gradients.values()), max_norm * (1 + tolerance)
    if not value <= limit:
        raw = {name: g for name, g in seen.raw.items() if name in gradients}
        whole = norm(raw.values()) / _scale_of(run)
        ratios = [norm([gradients[name]]) / (norm([raw[name]]) or 1.0) for name in raw]
        apart = max(ratios) > 2 * min(ratios)
        return subject.failed(
            value,
            limit,
            where=max(gradients, key=lambda name: norm([gradients[name]])),
            meaning=f"A gradient of norm {whole:.3g} reached the optimizer with norm {value:.3g}"
            + (", and its parts were divided by different numbers." if apart else "."),
            advice="Each tensor or group is clipped separately: call clip_grad_norm_ once for all of them."
            if apart
            else "Look for clipping that is skipped or comes after the update, and for an iterator that is "
            "exhausted, such as a stored model.parameters().",
        )
    passed = norm(small.updates[0].gradients.values()) / max_norm
    if passed > 0.9:
        return subject.failed(
            passed,
            _BELOW,
            where="global norm",
            meaning=f"A gradient of {_BELOW:g} times the limit was scaled to {passed:.3g} times the limit.",
            advice="The gradient is normalised: the factor limit / norm must be at most 1.",
        )
    is_stronger = value < max_norm * (1 - 5 * tolerance - 0.05)
    if is_stronger or abs(passed / _BELOW - 1) > max(tolerance, 0.02):
        return subject.warned(
            value,
            limit,
            where="global norm",
            meaning=f"Gradients of {_ABOVE:g} and {_BELOW:g} times the limit reach the optimizer with "
            f"{value / max_norm:.3g} and {passed:.3g} times the limit.",
            correct_if="there is a second limit on purpose, such as a limit of each value",
            advice="Look for gradients that are clipped twice or before they are unscaled, and for a factor "
            "between the backward pass and the update.",
        )
    return subject.passed(value, limit)


@trainer_check
def loss_scale(subject: TrainerSubject) -> CheckResult:
    """Is the gradient that the optimizer gets independent of the loss scale?"""
    gradients = []
    for factor in (1.0, _SCALES):
        run: Any = subject.run()
        needed(subject.scales(run), "an enabled gradient scaler")
        run.scaler.load_state_dict(run.scaler.state_dict() | {"scale": 2.0**8 * factor})
        with WithoutDropout():
            seen = train(subject, run, 1, factor=_AMPLIFIED)
        needed(seen.updates, "an update in the first step; the scaler skipped the update")
        gradients.append(seen.updates[0].gradients)
    plain, scaled = gradients
    return subject.at_most(
        distance(plain, scaled),
        max(_EXACT, _tolerance(run)),
        where="gradient at the update",
        meaning=f"With a loss scale {_SCALES:g} times as large, the optimizer gets a gradient of norm "
        f"{norm(scaled.values()):.3g} instead of {norm(plain.values()):.3g}.",
        advice="Clip after scaler.unscale_(optimizer), and unscale exactly once.",
    )


@trainer_check
def clipped_window(subject: TrainerSubject) -> CheckResult:
    """Is the sum of several micro-batch gradients clipped, without a change of its direction?"""
    max_norm = needed(subject.spec.max_norm, "max_norm, the norm to which the step clips")
    needed(subject.has(run := subject.run(), "accumulate"), "accumulate(batches)")
    value, size = _turned(subject, _MICRO_BATCHES, max_norm)
    tolerance, where = _tolerance(run), f"an update from {_MICRO_BATCHES} micro-batches"
    limit = max(_TURNED, 2 * tolerance)
    if value > limit:
        single, _ = _turned(subject, 1, max_norm)
        needed(single <= limit, "a step that divides all gradients of one batch by the same number")
        return subject.failed(
            value,
            limit,
            where=where,
            meaning=f"If the gradient is {_ABOVE:g} times the limit, clipping changes its direction, by "
            f"{100 * value:.3g} % of its length. With one batch, clipping changes only its length.",
            advice="Clip once, after the last backward pass. If clipping is inside the loop over "
            "micro-batches, the last micro-batch has the largest weight.",
        )
    if not size <= max_norm * (1 + tolerance):
        return subject.failed(
            size,
            max_norm * (1 + tolerance),
            where=where,
            meaning=f"The gradient reached the optimizer with norm {size:.3g}.",
            advice="Clip once, after the last backward pass and before the update.",
        )
    return subject.passed(value, limit)


def _turned(subject: TrainerSubject, n: int, max_norm: float) -> tuple[float, float]:
    """Return the change of the direction of n summed gradients by clipping, and their norm after it."""
    steps = _scaled(subject, (_ABOVE * max_norm, _BELOW**2 * max_norm), n)
    gradients = [seen.updates[-1].gradients for seen, _ in steps]
    lengths = [norm(each.values()) for each in gradients]
    pairs = zip(gradients, lengths, strict=True)
    units = [{name: g.double() / (length or 1.0) for name, g in each.items()} for each, length in pairs]
    return distance(*units), lengths[0]


def _scaled(
    subject: TrainerSubject, sizes: Sequence[float], n_micro_batches: int = 0
) -> list[tuple[Observation, TrainingRun]]:
    """Return a step for each size, which is the norm of its gradient before clipping, and its run.

    If `n_micro_batches` is above 0, the gradient is the sum over this number of micro-batches.
    """
    need = f"an update with a finite gradient in the first {'accumulate()' if n_micro_batches else 'step'}"
    unscaled, steps = 0.0, []
    for size in (0.0, *sizes):
        run: Any = subject.run()
        factor = size / unscaled if unscaled else 1.0
        with WithoutDropout(), subject.fixed_randomness(), observed(run, factor=factor) as seen:
            if n_micro_batches:
                run.accumulate([subject.batch(number) for number in range(n_micro_batches)])
            else:
                run.step(subject.batch())
        raw = norm(seen.raw.values())
        needed(bool(seen.updates) and 0 < raw < math.inf, need)
        unscaled = unscaled or raw / _scale_of(run)
        steps.append((seen, run))
    return steps[1:]


def _scale_of(run: TrainingRun) -> float:
    scaler = getattr(run, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def _tolerance(run: TrainingRun) -> float:
    dtypes = {p.dtype for p in run.model.parameters()}
    return max((_ROUNDING.get(dtype, _EXACT) for dtype in dtypes), default=_EXACT)

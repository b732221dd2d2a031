"""Clipping: the gradient at the optimizer has at most the declared norm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

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
    seen, run = _step_at(subject, _ABOVE * max_norm)
    small, _ = _step_at(subject, _BELOW * max_norm)
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
            advice="Each tensor or each group is clipped separately: pass all parameters to clip_grad_norm_ "
            "in one call."
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
    free, clipped = _windows(subject, _MICRO_BATCHES, max_norm)
    value, tolerance = _turned(free, clipped), _tolerance(run)
    size, where = norm(clipped.values()), f"an update from {_MICRO_BATCHES} micro-batches"
    limit = max(_TURNED, 2 * tolerance)
    if value > limit:
        single = _turned(*_windows(subject, 1, max_norm))
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


def _step_at(subject: TrainerSubject, size: float) -> tuple[Observation, TrainingRun]:
    """Return a step whose gradient has a norm of `size`, and its run."""
    need = "an update with a finite gradient in the first step"

    def step(factor: float) -> tuple[Observation, TrainingRun]:
        run = subject.run()
        with WithoutDropout():
            return train(subject, run, 1, factor=factor), run

    seen, run = step(1.0)
    unscaled = norm(seen.raw.values()) / _scale_of(run)
    needed(bool(seen.updates) and 0 < unscaled < math.inf, need)
    seen, run = step(size / unscaled)
    needed(seen.updates, need)
    return seen, run


def _windows(subject: TrainerSubject, n: int, max_norm: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradient of n micro-batches far below and far above the limit."""
    gradients, factor = list[dict[str, Tensor]](), 1.0
    for multiple in (1.0, _BELOW**2, _ABOVE):
        run: Any = subject.run()
        with WithoutDropout(), subject.fixed_randomness(), observed(run, factor=factor * multiple) as seen:
            run.accumulate([subject.batch(number) for number in range(n)])
        size = norm(seen.raw.values())
        is_finite = bool(seen.updates) and 0 < size < math.inf
        needed(is_finite, "an update with a finite gradient in the first accumulate()")
        if not gradients:
            factor = max_norm * _scale_of(run) / size
        gradients.append(seen.updates[-1].gradients)
    return gradients[1], gradients[2]


def _turned(free: dict[str, Tensor], clipped: dict[str, Tensor]) -> float:
    """Return the distance of two gradients after scaling both to length 1."""
    units = []
    for gradients in (clipped, free):
        length = norm(gradients.values())
        units.append({name: g.double() / length if length else g.double() for name, g in gradients.items()})
    return distance(*units)


def _scale_of(run: TrainingRun) -> float:
    scaler = getattr(run, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def _tolerance(run: TrainingRun) -> float:
    dtypes = {p.dtype for p in run.model.parameters()}
    return max((_ROUNDING.get(dtype, _EXACT) for dtype in dtypes), default=_EXACT)

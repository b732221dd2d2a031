"""Clipping: the gradient at the optimizer has at most the declared norm."""

from __future__ import annotations

import torch
from torch import Tensor

from stackwise.checks.check import trainer_check
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.probe.update import Observation, distance, norm, observed
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
_NO_CLAIM = "needs max_norm, the norm to which the step clips"
_NO_UPDATE = "needs an update with a finite gradient in the first step"


@trainer_check
def clipped_norm(subject: TrainerSubject) -> CheckResult:
    """Does clipping limit the gradient to the declared norm, and leave smaller gradients unchanged?"""
    large, small = (_step_at(subject, multiple) for multiple in (_ABOVE, _BELOW))
    if isinstance(large, str) or isinstance(small, str):
        return subject.not_applicable(large if isinstance(large, str) else str(small))
    seen, run, max_norm = large
    gradients, tolerance = seen.updates[0].gradients, _tolerance(run)
    value, limit = norm(gradients.values()), max_norm * (1 + tolerance)
    if not value <= limit:
        worst = max(gradients, key=lambda name: norm([gradients[name]]))
        raw = {name: g for name, g in seen.raw.items() if name in gradients}
        whole = norm(raw.values()) / _scale_of(run)
        ratios = {name: norm([gradients[name]]) / (norm([raw[name]]) or 1.0) for name in raw}
        apart = max(ratios.values()) > 2 * min(ratios.values())
        return subject.failed(
            value,
            limit,
            where=worst,
            meaning=f"A gradient of norm {whole:.3g} reached the optimizer with norm {value:.3g}"
            + (", and its parts were divided by different numbers." if apart else "."),
            advice="Each tensor or each group is clipped separately: pass all parameters to clip_grad_norm_ "
            "in one call."
            if apart
            else "Look for clipping that is skipped or comes after the update, and for an iterator that is "
            "exhausted, such as a stored model.parameters().",
        )
    passed = norm(small[0].updates[0].gradients.values()) / max_norm
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
    run = subject.run()
    if not subject.scales(run):
        return subject.not_applicable("needs an enabled gradient scaler")
    gradients = []
    for factor in (1.0, _SCALES):
        run = subject.run()
        state = run.scaler.state_dict()  # type: ignore[attr-defined]
        run.scaler.load_state_dict(state | {"scale": 2.0**8 * factor})  # type: ignore[attr-defined]
        with WithoutDropout(), subject.fixed_randomness(), observed(run, factor=_AMPLIFIED) as seen:
            run.step(subject.batch())
        if not seen.updates:
            return subject.not_applicable("needs an update in the first step; the scaler skipped the update")
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
    if (max_norm := subject.spec.max_norm) is None:
        return subject.not_applicable(_NO_CLAIM)
    if not subject.has(run := subject.run(), "accumulate"):
        return subject.not_applicable("needs accumulate(batches)")
    pair = _windows(subject, _MICRO_BATCHES, max_norm)
    if pair is None:
        return subject.not_applicable("needs an update with a finite gradient in the first accumulate()")
    free, clipped = pair
    value, limit = _turned(free, clipped), max(_TURNED, 2 * _tolerance(run))
    size, where = norm(clipped.values()), f"an update from {_MICRO_BATCHES} micro-batches"
    if value > limit:
        single = _windows(subject, 1, max_norm)
        if single is None or _turned(*single) > limit:
            return subject.not_applicable(
                "needs a step that divides all gradients of one batch by the same number"
            )
        return subject.failed(
            value,
            limit,
            where=where,
            meaning=f"If the gradient is {_ABOVE:g} times the limit, clipping changes its direction, by "
            f"{100 * value:.3g} % of its length. With one batch, clipping changes only its length.",
            advice="Clip once, after the last backward pass. If clipping is inside the loop over "
            "micro-batches, the last micro-batch has the largest weight.",
        )
    if not size <= max_norm * (1 + _tolerance(run)):
        return subject.failed(
            size,
            max_norm * (1 + _tolerance(run)),
            where=where,
            meaning=f"The gradient reached the optimizer with norm {size:.3g}.",
            advice="Clip once, after the last backward pass and before the update.",
        )
    return subject.passed(value, limit)


def _step_at(subject: TrainerSubject, multiple: float) -> tuple[Observation, TrainingRun, float] | str:
    """Return a step whose gradient has `multiple` times the declared norm, or what it needs."""
    if (max_norm := subject.spec.max_norm) is None:
        return _NO_CLAIM
    probe = subject.run()
    with WithoutDropout(), subject.fixed_randomness(), observed(probe) as seen:
        probe.step(subject.batch())
    size = norm(seen.raw.values()) / _scale_of(probe)
    if not seen.updates or not 0 < size < float("inf"):
        return _NO_UPDATE
    run = subject.run()
    with (
        WithoutDropout(),
        subject.fixed_randomness(),
        observed(run, factor=multiple * max_norm / size) as seen,
    ):
        run.step(subject.batch())
    return (seen, run, max_norm) if seen.updates else _NO_UPDATE


def _windows(
    subject: TrainerSubject, n: int, max_norm: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
    """Return the gradient of n micro-batches far below and far above the limit, or None without an update."""
    gradients = []
    factor = 1.0
    for multiple in (None, _BELOW**2, _ABOVE):
        run = subject.run()
        scaled = factor * (1.0 if multiple is None else multiple)
        with WithoutDropout(), subject.fixed_randomness(), observed(run, factor=scaled) as seen:
            run.accumulate([subject.batch(number) for number in range(n)])  # type: ignore[attr-defined]
        if not seen.updates:
            return None
        size = norm(seen.raw.values())
        if not 0 < size < float("inf"):
            return None
        if multiple is None:
            factor = max_norm * _scale_of(run) / size
        else:
            gradients.append(seen.updates[-1].gradients)
    return gradients[0], gradients[1]


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

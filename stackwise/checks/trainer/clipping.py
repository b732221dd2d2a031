"""Clipping: the gradient that the optimizer sees has at most the norm that is claimed."""

from __future__ import annotations

import torch

from stackwise.checks.check import trainer_check
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.probe.update import Observation, distance, norm, observed
from stackwise.checks.result import CheckResult
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.trainer_spec import TrainingRun

_ABOVE = 20.0
_BELOW = 0.1
_ROUNDING = {torch.bfloat16: 0.02, torch.float16: 0.005}
_EXACT = 1e-3
_SCALES = 64.0
_AMPLIFIED = 1e3
_NO_UPDATE = "needs an update with a finite gradient in the first step"


@trainer_check
def clipped_norm(subject: TrainerSubject) -> CheckResult:
    """Has the gradient that the optimizer sees at most the norm that is claimed?"""
    step = _step_at(subject, _ABOVE)
    if isinstance(step, str):
        return subject.not_applicable(step)
    seen, run, max_norm = step
    gradients = seen.updates[0].gradients
    value, limit = norm(gradients.values()), max_norm * (1 + _tolerance(run))
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
            meaning=f"a gradient of norm {whole:.3g} reached the optimizer with norm {value:.3g}"
            + (", its parts shrunk by different factors" if apart else ""),
            advice="each tensor or each group is clipped alone: pass all parameters to clip_grad_norm_ at "
            "once"
            if apart
            else "clipping is skipped, comes after the update, or got an iterator that was used up, such as "
            "model.parameters() kept from before",
        )
    if value < max_norm * (1 - 5 * _tolerance(run) - 0.05):
        return subject.warned(
            value,
            limit,
            where="global norm",
            meaning=f"a gradient {_ABOVE:g} times over the limit was shrunk to {value:.3g}, below it",
            advice="clipped before it was unscaled, twice, or by value: then the limit is not the one that "
            "is set",
        )
    return subject.passed(value, limit)


@trainer_check
def small_gradients_pass(subject: TrainerSubject) -> CheckResult:
    """Is a gradient below the limit left as it is?"""
    step = _step_at(subject, _BELOW)
    if isinstance(step, str):
        return subject.not_applicable(step)
    seen, run, max_norm = step
    value = norm(seen.updates[0].gradients.values()) / max_norm
    limit = _BELOW * (1 + max(_tolerance(run), 0.02))
    if value > 0.9:
        return subject.failed(
            value,
            limit,
            where="global norm",
            meaning=f"a gradient of {_BELOW:g} times the limit was stretched to {value:.3g} times",
            advice="the gradient is normalised: the factor limit / norm must be at most 1",
        )
    if abs(value - _BELOW) > limit - _BELOW:
        return subject.warned(
            value,
            limit,
            where="global norm",
            meaning=f"a gradient of {_BELOW:g} times the limit reached the optimizer as {value:.3g} times",
            advice="it is scaled between backward and the update: then the limit is not the one that is set",
        )
    return subject.passed(value, limit)


@trainer_check
def loss_scale(subject: TrainerSubject) -> CheckResult:
    """Does the gradient that the optimizer sees not depend on the loss scale?"""
    run = subject.run()
    if not subject.has(run, "scaler") or "scale" not in run.scaler.state_dict():  # type: ignore[attr-defined]
        return subject.not_applicable("needs a gradient scaler that is switched on")
    gradients = []
    for factor in (1.0, _SCALES):
        run = subject.run()
        state = run.scaler.state_dict()  # type: ignore[attr-defined]
        run.scaler.load_state_dict(state | {"scale": 2.0**8 * factor})  # type: ignore[attr-defined]
        with WithoutDropout(), subject.fixed_randomness(), observed(run, factor=_AMPLIFIED) as seen:
            run.step(subject.batch())
        if not seen.updates:
            return subject.not_applicable("needs an update in the first step; the scaler left it out")
        gradients.append(seen.updates[0].gradients)
    plain, scaled = gradients
    return subject.at_most(
        distance(plain, scaled),
        max(_EXACT, _tolerance(run)),
        where="gradient at the update",
        meaning=f"with a loss scale {_SCALES:g} times as large the optimizer sees a gradient of norm "
        f"{norm(scaled.values()):.3g} instead of {norm(plain.values()):.3g}",
        advice="clip after scaler.unscale_(optimizer), and unscale exactly once",
    )


def _step_at(subject: TrainerSubject, multiple: float) -> tuple[Observation, TrainingRun, float] | str:
    """One step whose gradient has `multiple` times the claimed norm, and that norm; else what it needs."""
    if (max_norm := subject.spec.max_norm) is None:
        return "needs max_norm, the norm that the step claims to clip to"
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


def _scale_of(run: TrainingRun) -> float:
    scaler = getattr(run, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def _tolerance(run: TrainingRun) -> float:
    dtypes = {p.dtype for p in run.model.parameters()}
    return max((_ROUNDING.get(dtype, _EXACT) for dtype in dtypes), default=_EXACT)

"""Clipping: the gradient that the optimizer sees has at most the norm that is claimed."""

from __future__ import annotations

import torch

from stackwise.checks.check import trainer_check
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.probe.update import Observation, distance, norm, observed
from stackwise.checks.result import CheckResult
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.trainer_spec import TrainingRun

__all__ = ["clipped_norm", "loss_scale", "small_gradients_pass"]

_ABOVE = 20.0
_BELOW = 0.1
_ROUNDING = {torch.bfloat16: 0.02, torch.float16: 0.005}
_EXACT = 1e-3
_SCALES = 64.0
_AMPLIFIED = 1e3


@trainer_check
def clipped_norm(subject: TrainerSubject) -> CheckResult:
    """Has the gradient that the optimizer sees at most the norm that is claimed?"""
    if subject.spec.max_norm is None:
        return subject.not_applicable("needs max_norm, the norm that the step claims to clip to")
    seen, run = _step_at(subject, _ABOVE)
    if seen is None:
        return subject.not_applicable("needs an update with a finite gradient in the first step")
    gradients = seen.updates[0].gradients
    value, limit = norm(gradients), subject.spec.max_norm * (1 + _tolerance(run))
    if not value <= limit:
        worst = max(gradients, key=lambda name: norm({name: gradients[name]}))
        raw = {name: g for name, g in seen.raw.items() if name in gradients}
        whole = norm(raw) / _scale_of(run)
        ratios = {name: norm({name: gradients[name]}) / (norm({name: raw[name]}) or 1.0) for name in raw}
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
    if value < subject.spec.max_norm * (1 - 5 * _tolerance(run) - 0.05):
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
    if subject.spec.max_norm is None:
        return subject.not_applicable("needs max_norm, the norm that the step claims to clip to")
    seen, run = _step_at(subject, _BELOW)
    if seen is None:
        return subject.not_applicable("needs an update with a finite gradient in the first step")
    value = norm(seen.updates[0].gradients) / subject.spec.max_norm
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
    value, limit = distance(*gradients), max(_EXACT, _tolerance(run))
    if value > limit:
        return subject.failed(
            value,
            limit,
            where="gradient at the update",
            meaning=f"with a loss scale {_SCALES:g} times as large the optimizer sees a gradient of norm "
            f"{norm(gradients[1]):.3g} instead of {norm(gradients[0]):.3g}",
            advice="clip after scaler.unscale_(optimizer), and unscale exactly once",
        )
    return subject.passed(value, limit)


def _step_at(subject: TrainerSubject, multiple: float) -> tuple[Observation | None, TrainingRun]:
    """One step whose gradient has `multiple` times the claimed norm; None: there is no such step."""
    assert subject.spec.max_norm is not None
    probe = subject.run()
    with WithoutDropout(), subject.fixed_randomness(), observed(probe) as seen:
        probe.step(subject.batch())
    size = norm(seen.raw) / _scale_of(probe)
    if not seen.updates or not 0 < size < float("inf"):
        return None, probe
    run = subject.run()
    factor = multiple * subject.spec.max_norm / size
    with WithoutDropout(), subject.fixed_randomness(), observed(run, factor=factor) as seen:
        run.step(subject.batch())
    return (seen if seen.updates else None), run


def _scale_of(run: TrainingRun) -> float:
    scaler = getattr(run, "scaler", None)
    return 1.0 if scaler is None else float(scaler.get_scale())


def _tolerance(run: TrainingRun) -> float:
    dtypes = {p.dtype for p in run.model.parameters()}
    return max((_ROUNDING.get(dtype, _EXACT) for dtype in dtypes), default=_EXACT)

"""Non-finite gradients: a step without an update leaves everything unchanged, and later steps train."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stackwise.checks.check import trainer_check
from stackwise.checks.probe.run_state import State, different, state_of
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.runs.averages import averages_of
from stackwise.checks.runs.sequence import is_close
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import TrainingRun
from stackwise.support.optimizer_state import optimizers_in
from stackwise.support.system_errors import reraise_if_out_of_memory

# Steps before the one with the non-finite gradients. Some loops collect a history before they skip a step.
_STEPS_BEFORE = (2, 13)
# Steps after it, one of which must make an update.
_STEPS_AFTER = 10
_UNPROTECTED = "needs a run that makes no update with non-finite gradients: see non_finite_gradient"


@dataclass(frozen=True)
class _Outcome:
    """Run around a step whose gradients are all NaN.

    Attributes:
        before, after: state before and after this step.
        finite: True if weights, optimizer state and averages are finite after it.
        trains: True if a step after it changes a weight.
        broken: names of the parameters whose gradient was NaN.
        is_earlier: True if its weights are those of an earlier step, which it restored.
    """

    before: State
    after: State
    finite: bool
    trains: bool
    broken: set[str]
    is_earlier: bool


@trainer_check
def skipped_step(subject: TrainerSubject) -> CheckResult:
    """If a step has only non-finite gradients, are weights, moments, counters and schedule unchanged?"""
    for n_before in _STEPS_BEFORE:
        outcome = _outcome(subject, n_before)
        if outcome is None or not outcome.finite:
            continue
        if changed := _changed(subject, outcome):
            return _reported(subject, changed, n_before)
        return subject.passed(0.0, 0.0, meaning=f"{len(outcome.before)} entries are unchanged.")
    return subject.not_applicable(_UNPROTECTED)


@trainer_check
def recovers_after_skip(subject: TrainerSubject) -> CheckResult:
    """Does the run train again after a step with non-finite gradients?"""
    seen = 0
    for n_before in _STEPS_BEFORE:
        outcome = _outcome(subject, n_before)
        if outcome is None or not outcome.finite:
            continue
        seen += 1
        if not outcome.trains and _trains(subject, n_before):
            return subject.failed(
                0.0,
                where=f"the {_STEPS_AFTER} steps after step {n_before}",
                meaning="After one step with non-finite gradients, no later step makes an update.",
                advice="Keep the NaN out of everything that decides about later updates, such as a history "
                "of losses or norms: each comparison with NaN is false.",
            )
    return subject.passed(meaning="Later steps train.") if seen else subject.not_applicable(_UNPROTECTED)


def _reported(subject: TrainerSubject, changed: list[str], n_before: int) -> CheckResult:
    """Return a failure, or a warning if only the schedule advances, with each implementation."""
    weights = [name for name in changed if name.startswith("model.")]
    moments = [name for name in changed if name.startswith("optimizer.") and ".group " not in name]
    schedule = [name for name in changed if name not in weights and name not in moments]
    parts = [
        f"{len(names)} {kind}"
        for names, kind in (
            (weights, "weights"),
            (moments, "entries of the optimizer state"),
            (schedule, "entries of the schedule"),
        )
        if names
    ]
    advice = (
        "Skip the whole update: gradients that are replaced by zeros still move the weights by momentum and "
        "weight decay, and advance counters and schedule."
        if weights or moments
        else "Step the scheduler only if the optimizer made an update. With a GradScaler, compare its scale "
        "before and after update(): a fused optimizer is called also if it skips the update."
    )
    correct_if = None
    if not (weights or moments):
        # If the schedule stays with an optimizer that is not fused, it is meant to.
        other = _outcome(subject, n_before, unfused=True)
        is_meant = other is not None and not _changed(subject, other)
        correct_if = None if is_meant else "the schedule counts steps on purpose, and not updates"
    return subject.failed_unless(
        correct_if,
        float(len(changed)),
        0.0,
        where=f"step {n_before}: {listed(weights or moments or schedule)}",
        meaning=f"No gradient of a step is finite, and the step changes {' and '.join(parts)}.",
        advice=advice,
    )


def _changed(subject: TrainerSubject, outcome: _Outcome) -> list[str]:
    """Return the names of changed state that a step without an update may not change.

    These are the weights and the optimizer state of parameters with a NaN gradient, and a schedule.
    """
    if outcome.is_earlier:
        return []
    before, after = outcome.before, outcome.after
    has_scheduler = subject.has(subject.run(), "scheduler")

    def counts(name: str) -> bool:
        kind, _, rest = name.partition(".")
        if kind == "model":
            return rest in outcome.broken
        if kind == "scheduler" or (name.startswith("optimizer.group") and name.endswith(".lr")):
            return has_scheduler  # a rate that follows the number of the step needs no scheduler
        return kind == "optimizer" and rest.rpartition(".")[0] in outcome.broken

    names = [name for name in {**before, **after} if counts(name)]
    return [name for name in names if not is_close(before.get(name), after.get(name))]


def _outcome(subject: TrainerSubject, n_before: int, *, unfused: bool = False) -> _Outcome | None:
    """Run some steps, one with NaN as gradients, and some more. None: a step raises, or a guard responds."""
    run = subject.run()
    if unfused:
        _unfuse(run)
    try:
        with subject.fixed_randomness():
            earlier = [state_of(run)]
            for number in range(n_before):
                run.step(subject.batch(number))
                earlier.append(state_of(run))
            before, n_alarms = earlier.pop(), len(_alarms(run))
            with _broken_gradients(run) as broken:
                run.step(subject.batch(n_before))
            after = state_of(run)
            finite = not _became_non_finite(before, after) and not _became_non_finite({}, averages_of(run))
            if len(_alarms(run)) > n_alarms:
                return None
            for number in range(n_before + 1, n_before + 1 + _STEPS_AFTER):
                run.step(subject.batch(number))
    except Exception as error:  # non_finite_gradient reports what the step raises
        reraise_if_out_of_memory(error)
        return None
    is_earlier = any(not _weights_differ(each, after) for each in earlier) and _weights_differ(before, after)
    return _Outcome(before, after, finite, _weights_differ(after, state_of(run)), broken, is_earlier)


def _trains(subject: TrainerSubject, n_before: int) -> bool:
    """Return True if the same steps change a weight without the broken one."""
    run = subject.run()
    with subject.fixed_randomness():
        for number in range(n_before):
            run.step(subject.batch(number))
        before = state_of(run)
        for number in range(n_before + 1, n_before + 1 + _STEPS_AFTER):
            run.step(subject.batch(number))
    return _weights_differ(before, state_of(run))


@contextmanager
def _broken_gradients(run: TrainingRun) -> Iterator[set[str]]:
    """Inside, each gradient is NaN. Yield the names of the parameters that got one."""
    broken: set[str] = set()

    def hook_of(name: str) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            broken.add(name)
            return gradient * math.nan

        return hook

    handles = [
        p.register_hook(hook_of(name))  # type: ignore[no-untyped-call]
        for name, p in run.model.named_parameters()
        if p.requires_grad
    ]
    try:
        yield broken
    finally:
        for handle in handles:
            handle.remove()


def _unfuse(run: TrainingRun) -> None:
    """Let each optimizer use an implementation that a GradScaler does not call if it skips an update."""
    for optimizer in optimizers_in(run.optimizer):
        optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        for group in optimizer.param_groups:
            group |= {name: False for name in ("fused",) if group.get(name)}


def _alarms(run: Any) -> list[Any]:
    return list(getattr(run, "alarms", None) or getattr(getattr(run, "guard", None), "alarms", None) or ())


def _became_non_finite(before: State, after: State) -> bool:
    def is_finite(value: Any) -> bool:
        return not isinstance(value, Tensor) or bool(torch.isfinite(value).all())

    return any(is_finite(before.get(name)) and not is_finite(value) for name, value in after.items())


def _weights_differ(a: State, b: State) -> bool:
    return any(name.startswith("model.") for name in different(a, b))

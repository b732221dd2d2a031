"""Non-finite gradients: a step without an update leaves everything unchanged, and later ones make updates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from stackwise.checks.probe.applicable import needed, trainer_check
from stackwise.checks.probe.run_state import ROUNDING, State, different, state_of
from stackwise.checks.probe.update import weights_of
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.runs.averages import averages_of
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import TrainingRun
from stackwise.support.hooks import temporary_hooks
from stackwise.support.optimizer_state import optimizers_in
from stackwise.support.system_errors import reraise_if_out_of_memory

# First and later step whose gradients are NaN: some loops collect a history before they skip a step.
_FIRST, _LATER = 2, 13
# Steps after the step with NaN gradients. One of them must make an update.
_STEPS_AFTER = 10


@dataclass(frozen=True)
class _Outcome:
    """Run with a step whose gradients are all NaN.

    Attributes:
        step: number of this step, from 0. The step makes an update if its gradients are finite.
        before, after: state before and after this step.
        earlier: weights before each earlier step.
        end: state after the later steps.
        names: names of the parameters with a NaN gradient.
        spoiled: fraction of the weights that are not finite after the later steps.
    """

    step: int
    before: State
    after: State
    earlier: list[State]
    end: State
    names: set[str]
    spoiled: float

    @property
    def restores(self) -> bool:
        """Return True if the step restores the weights of an earlier one."""
        is_changed = _weights_differ(self.before, self.after)
        return is_changed and any(not _weights_differ(each, self.after) for each in self.earlier)

    @property
    def is_protected(self) -> bool:
        """Return True if gradients were NaN, and neither weights nor optimizer nor averages became NaN."""

        def is_finite(value: Any) -> bool:
            return not isinstance(value, Tensor) or bool(torch.isfinite(value).all())

        ends = (*self.after.items(), *self.end.items())
        return bool(self.names) and all(
            is_finite(value) or not is_finite(self.before.get(name)) for name, value in ends
        )


@trainer_check
def skipped_step(subject: TrainerSubject) -> CheckResult:
    """If a step has only non-finite gradients, are weights, moments, counters and schedule unchanged?"""
    for outcome in _outcomes(subject):
        if outcome.spoiled and subject.scales(subject.run()):
            return subject.failed(
                outcome.spoiled,
                0.0,
                where="the update after a gradient that is not finite",
                meaning="The run has a scaler, but the update is not skipped: "
                f"{100 * outcome.spoiled:.3g} % of the weights are not finite afterwards.",
                advice="Call scaler.step(optimizer) instead of optimizer.step(): it skips updates with "
                "overflowed gradients, which a loss scale causes regularly.",
            )
    outcomes = _protected_outcomes(subject)
    for outcome in outcomes:
        if changed := _changed(subject, outcome):
            return _reported(subject, changed, outcome.step)
    return subject.passed(0.0, 0.0, meaning=f"{len(outcomes[0].before)} entries are unchanged.")


@trainer_check
def recovers_after_skip(subject: TrainerSubject) -> CheckResult:
    """Does the run make updates again after a step with non-finite gradients?"""
    for outcome in _protected_outcomes(subject):
        if not _weights_differ(outcome.after, outcome.end):
            return subject.failed(
                0.0,
                where=f"the {_STEPS_AFTER} steps after step {outcome.step}",
                meaning="After one step with non-finite gradients, no later step makes an update.",
                advice="Keep the NaN out of everything that decides about later updates, such as a history "
                "of losses or norms: each comparison with NaN is false.",
            )
    return subject.passed(meaning="Later steps make updates.")


def _protected_outcomes(subject: TrainerSubject) -> list[_Outcome]:
    outcomes = [each for each in _outcomes(subject) if each.is_protected]
    return needed(outcomes, "a run that skips updates with non-finite gradients")


def _reported(subject: TrainerSubject, changed: list[str], step: int) -> CheckResult:
    """Return a failure, or a warning if only the schedule advances, with each implementation."""
    weights = [name for name in changed if name.startswith("model.")]
    averages = [name for name in changed if name.startswith("average.")]
    moments = [name for name in changed if name.startswith("optimizer.") and ".group " not in name]
    kinds = {
        "weight tensors": weights,
        "entries of the optimizer state": moments,
        "entries of the schedule": [n for n in changed if n not in {*weights, *averages, *moments}],
        "tensors of an average": averages,
    }
    parts = [f"{kind} ({len(names)})" for kind, names in kinds.items() if names]
    advice = (
        "Skip the whole update: gradients that are replaced by zeros still move the weights by momentum and "
        "weight decay, and advance counters and schedule."
        if weights or moments
        else "Step the scheduler only if the optimizer made an update. With a GradScaler, compare its scale "
        "before and after update(): a fused optimizer is called also if it skips the update."
    )
    correct_if = None
    if averages == changed:
        correct_if = "the average is updated in each step, also without an update of the weights"
        advice = "Update the average only if the optimizer made an update."
    elif not (weights or moments):
        # If the schedule does not change with an unfused optimizer, the run means to skip its step.
        other = _outcome(subject, step, unfused=True)
        is_meant = other is not None and other.is_protected and not _changed(subject, other)
        correct_if = None if is_meant else "the schedule counts steps instead of updates on purpose"
    return subject.failed_unless(
        correct_if,
        float(len(changed)),
        0.0,
        where=f"step {step}: {listed(next(filter(None, kinds.values())))}",
        meaning=f"No gradient of the step is finite, but the step changes {' and '.join(parts)}.",
        advice=advice,
    )


def _changed(subject: TrainerSubject, outcome: _Outcome) -> list[str]:
    """Return the names of changed state that a step without an update may not change.

    These are the weights and the optimizer state of parameters with a NaN gradient, and a schedule.
    """
    if outcome.restores:
        return []
    has_scheduler = subject.has(subject.run(), "scheduler")

    def counts(name: str) -> bool:
        kind, _, rest = name.partition(".")
        if kind == "model":
            return rest in outcome.names
        if kind == "average":
            return True
        if kind == "scheduler" or (name.startswith("optimizer.group") and name.endswith(".lr")):
            return has_scheduler  # without a scheduler, the rate may depend on the number of the step
        return kind == "optimizer" and rest.rpartition(".")[0] in outcome.names

    return [name for name in different(outcome.before, outcome.after, rounding=ROUNDING) if counts(name)]


@lru_cache(maxsize=1)
def _outcomes(subject: TrainerSubject) -> list[_Outcome]:
    """Return the outcomes of an early and a later step that make an update and precede another one."""
    run, updates = subject.run(), list[int]()
    # A schedule may end after a few steps, and raise.
    with subject.fixed_randomness(), suppress(ValueError, IndexError, StopIteration):
        for number in range(_LATER + 2 * _STEPS_AFTER):
            before = weights_of(run)
            run.step(subject.batch(number))
            if different(before, weights_of(run)):
                updates.append(number)
    firsts = [next((each for each in updates if each >= least), math.inf) for least in (_FIRST, _LATER)]
    steps = [first for first in firsts if any(0 < each - first <= _STEPS_AFTER for each in updates)]
    outcomes = (_outcome(subject, int(step)) for step in steps)
    return [each for each in outcomes if each is not None]


def _outcome(subject: TrainerSubject, step: int, *, unfused: bool = False) -> _Outcome | None:
    """Run steps, one of them with NaN gradients. Return None if a step raises or a guard responds.

    If `unfused`, each optimizer is unfused. A GradScaler does not call unfused ones if it skips an update.
    """
    run: Any = subject.run()
    earlier = list[State]()
    for optimizer in optimizers_in(run.optimizer) if unfused else ():
        optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        for group in optimizer.param_groups:
            if group.get("fused"):
                group["fused"] = False

    def n_alarms() -> int:
        return len(getattr(run, "alarms", None) or getattr(getattr(run, "guard", None), "alarms", None) or ())

    try:
        with subject.fixed_randomness():
            for number in range(step):
                earlier.append(_weights_of(run))
                run.step(subject.batch(number))
            before, n_before = _state_of(run), n_alarms()
            with _nan_gradients(run) as names:
                run.step(subject.batch(step))
            after, n_after = _state_of(run), n_alarms()
            for number in range(step + 1, step + 1 + _STEPS_AFTER):
                run.step(subject.batch(number))
    except Exception as error:  # the run may stop by an exception
        reraise_if_out_of_memory(error)
        return None
    weights = torch.cat([p.detach().flatten().isfinite() for p in run.model.parameters()])
    spoiled = float((~weights).double().mean()) if names else 0.0
    if n_after > n_before:
        return None
    return _Outcome(step, before, after, earlier, _state_of(run), names, spoiled)


def _state_of(run: TrainingRun) -> State:
    """Return the state with the averages of the weights."""
    return state_of(run) | {f"average.{path}": tensor for path, tensor in averages_of(run).items()}


def _weights_of(run: TrainingRun) -> State:
    return {f"model.{name}": value for name, value in weights_of(run).items()}


@contextmanager
def _nan_gradients(run: TrainingRun) -> Iterator[set[str]]:
    """Set each gradient to NaN, and yield the names of the parameters with such a gradient."""
    names: set[str] = set()

    def hook(name: str, gradient: Tensor) -> Tensor:
        names.add(name)
        return gradient * math.nan

    trained = [(name, p) for name, p in run.model.named_parameters() if p.requires_grad]
    with temporary_hooks(p.register_hook(partial(hook, name)) for name, p in trained):  # type: ignore[no-untyped-call]
        yield names


def _weights_differ(a: State, b: State) -> bool:
    names = [name for name in a if name in b and name.startswith("model.")]
    return bool(different({name: a[name] for name in names}, {name: b[name] for name in names}))

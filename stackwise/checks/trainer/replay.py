"""Replay: updates are those of an optimizer with only one parameter, and options have an effect."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import nn

from stackwise.checks.probe.applicable import UnmeasuredError, needed, trainer_check
from stackwise.checks.probe.call import reason_of
from stackwise.checks.probe.update import each_update, observed, train, weights_of
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.runs.replay import (
    Recording,
    Replayed,
    coupled_decay,
    options_without_effect,
    recorded,
    replayed,
)
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import TrainingRun
from stackwise.support.optimizer_state import states_of
from stackwise.support.system_errors import reraise_if_out_of_memory

T = TypeVar("T")

# Implementations for one parameter and for many round differently.
_LIMIT = 0.05
_STEPS, _COUNTED_STEPS = 9, 3
# Names of optimizers that subtract weight decay from the weights. Cautious ones skip some elements.
_DECOUPLED = re.compile("^(?!.*Cautious).*(AdamW|SGDW|Lion|Muon)")
# Largest share of the effect of weight decay that rounding explains, in float64.
_COUPLED = 1e-3
# Factor that makes gradients so small that their norm is below any limit.
_SMALL = 1e-3
# Steps in which some parameters do not train.
_FROZEN_STEPS = (2, 3, 6)


@trainer_check
def separate_updates(subject: TrainerSubject) -> CheckResult:
    """Is the update of each parameter independent of the others, even if some are frozen for some steps?"""
    result = _compared(subject, freeze=False)
    if result.status == "passed":
        result = _compared(subject, freeze=True)
    if result.status != "passed":
        return result
    by_optimizer, by_step = _changed_while_frozen(subject)
    if not by_step:
        return result
    # An optimizer may take a missing gradient as zero, so that only its momentum moves the parameter.
    with_zeros = _changed_while_frozen(subject, zero_gradients=True)[0] if by_optimizer else {}
    stale = [
        name
        for name, change in by_optimizer.items()
        if name not in with_zeros or not torch.allclose(change, with_zeros[name], rtol=1e-3, atol=0.0)
    ]
    where = sorted(stale or by_step)
    return subject.failed_unless(
        None
        if stale
        else "the loop changes frozen parameters on purpose, trains them again in the step, or takes a "
        "missing gradient as zero",
        float(len(where)),
        0.0,
        where=listed(where),
        meaning="The check freezes these parameters in three steps. "
        + (
            "optimizer.step() changes them although they have no gradient, and unlike a gradient of zero."
            if stale
            else "Each of these steps changes them."
        ),
        advice="Skip parameters whose grad is None. Look for gradients that zero_grad() does not clear.",
    )


def _changed_while_frozen(
    subject: TrainerSubject, *, zero_gradients: bool = False
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Return the parameters that change in each step in which they are frozen.

    These are the changes by `optimizer.step` in the first of these steps, and the names of the parameters
    that any part of each step changes. See `_frozen` for `zero_gradients`.
    """
    run = subject.run()
    changes, by_step = list[dict[str, torch.Tensor]](), list[set[str]]()
    with subject.fixed_randomness():
        for number in range(min(_STEPS, subject.spec.total_steps or _STEPS)):
            if number not in _FROZEN_STEPS:
                run.step(subject.batch(number))
                continue
            before = weights_of(run)
            with _frozen(run, zero_gradients) as frozen, observed(run) as seen:
                run.step(subject.batch(number))
            named = run.model.named_parameters()
            by_step.append({n for n, p in named if id(p) in frozen and _is_moved(p.detach(), before[n])})
            changes.append(
                {
                    name: update.moved(name)
                    for update in seen.updates
                    for name in by_step[-1]
                    if (zero_gradients or name not in update.gradients)
                    and _is_moved(update.after[name], update.before[name])
                }
            )
    if not by_step:
        return {}, set()
    always = set.intersection(*(set(each) for each in changes))
    return {name: changes[0][name] for name in always}, set.intersection(*by_step)


def _is_moved(after: torch.Tensor, before: torch.Tensor) -> bool:
    """Return True if a parameter has changed by more than rounding, as by a projection to the same norm."""
    limit = 4 * torch.finfo(before.dtype).eps * before.abs().max()
    return not bool((after - before).abs().max() <= limit)


@trainer_check
def step_counters(subject: TrainerSubject) -> CheckResult:
    """Does the step counter in the state of each parameter advance with its updates?"""
    run = subject.run()
    train(subject, run, 1)
    before = needed(_counters(run), "an optimizer with a counter named step in its state")
    start = weights_of(run)
    train(subject, run, _COUNTED_STEPS - 1)
    after, end = _counters(run), weights_of(run)
    trained = [name for name in before if not torch.equal(end[name], start[name])]
    still = [name for name in trained if after.get(name) == before[name]]
    if not still:
        return subject.passed(0.0, 0.0, meaning=f"Compared counters: {len(before)}.")
    return subject.failed(
        float(len(still)),
        0.0,
        where=listed(still),
        meaning=f"The step counter of these parameters is {before[still[0]]:g} after the first step and "
        f"after {_COUNTED_STEPS} steps.",
        advice="Increase the counter in each update: the bias correction depends on it.",
    )


def _counters(run: TrainingRun) -> dict[str, float]:
    """Return the step counter of each parameter that has one, by name."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    counters = {}
    for _, key, values in states_of(run.optimizer):
        step = values.get("step") if isinstance(values, Mapping) else None
        if id(key) in names and isinstance(step, int | float | torch.Tensor) and not isinstance(step, bool):
            counters[names[id(key)]] = float(step)
    return counters


@trainer_check
def option_effects(subject: TrainerSubject) -> CheckResult:
    """Do momentum and weight decay of the optimizer have an effect?"""
    for recording in _recordings(subject, freeze=False):
        if ignored := _tried(options_without_effect, recording):
            return subject.failed(
                0.0,
                where=f"{recording.kind}: {', '.join(ignored)}",
                meaning=f"The updates of {recording.kind} are the same with half of the {ignored[0]}.",
                advice="Look for a state that each step clears, and for an option that is not read.",
            )
    return subject.passed()


@trainer_check
def decoupled_decay(subject: TrainerSubject) -> CheckResult:
    """Does an optimizer such as AdamW subtract weight decay from the weights, not from the gradient?"""
    largest = -1.0
    for recording in _recordings(subject, freeze=False):
        if not any(_DECOUPLED.search(kind.__name__) for kind in type(recording.optimizer).__mro__):
            continue
        shares = _tried(coupled_decay, recording)
        largest = max(largest, *shares.values(), -1.0)
        if wrong := [name for name, share in shares.items() if share > _COUPLED]:
            return subject.failed(
                largest,
                _COUPLED,
                where=f"{recording.kind}: {listed(wrong)}",
                meaning="The effect of weight decay on an update is not a multiple of the weight.",
                advice="Subtract lr * weight_decay * weight from the weight. If the decay is added to the "
                "gradient, the optimizer divides it by the second moment, or takes only its sign.",
            )
    needed(largest >= 0, "an AdamW, Lion or Muon with weight decay")
    return subject.passed(largest, _COUPLED)


def _compared(subject: TrainerSubject, *, freeze: bool) -> CheckResult:
    """Compare the updates of a run in which all parameters train, or some are frozen in some steps."""
    largest, count = 0.0, 0
    for recording in _recordings(subject, freeze=freeze):
        found = _tried(replayed, recording)
        largest = max(largest, *(each.gap for each in found))
        count += len(found)
        if any(each.gap > _LIMIT for each in found):
            # If all parameters train, the difference may be intended. The same is true of clipping inside the
            # optimizer, which does not change small gradients.
            is_meant = not freeze and not recording.has_pauses
            return _reported(
                subject, recording, found, may_be_meant=is_meant or _small_gradients_agree(subject, freeze)
            )
    return subject.passed(largest, _LIMIT, meaning=f"Compared parameters: {count}.")


def _small_gradients_agree(subject: TrainerSubject, freeze: bool) -> bool:
    """Return True if the updates of each parameter are independent after gradients are made small."""
    recordings = _recordings(subject, freeze=freeze, factor=_SMALL)
    return all(each.gap <= _LIMIT for recording in recordings for each in replayed(recording))


def _reported(
    subject: TrainerSubject, recording: Recording, found: list[Replayed], *, may_be_meant: bool
) -> CheckResult:
    kind = recording.kind
    wrong = [each for each in found if each.gap > _LIMIT]
    worst = max(wrong, key=lambda each: each.gap)
    where = f"{listed([each.name for each in wrong])}, update {worst.update}"
    if worst.gap == math.inf and not math.isfinite(worst.length):
        return subject.failed(
            worst.gap,
            _LIMIT,
            where=where,
            meaning=f"{kind} makes an update that is not finite from a finite gradient.",
            advice="Look for a division by a bias correction or a norm of 0.",
        )
    return subject.failed_unless(
        f"{kind} couples the parameters or draws random numbers, or other code changes its state"
        if may_be_meant
        else None,
        worst.gap,
        _LIMIT,
        where=where,
        meaning=f"{len(wrong)} of {len(found)} parameters get a different update than {kind} makes if it "
        f"contains only this parameter. The update of {worst.name} is {worst.length:.3g} times as long.",
        advice="Keep a counter and moments for each parameter, which may have no gradient in a step.",
    )


def _tried(function: Callable[[Recording], T], recording: Recording) -> T:
    """Return the result of a replay.

    Raises:
        UnmeasuredError: the optimizer does not run with one parameter.
    """
    try:
        return function(recording)
    except Exception as error:
        reraise_if_out_of_memory(error)
        need = f"needs {recording.kind} to run with one parameter: {reason_of(error)}"
        raise UnmeasuredError(need) from error


def _recordings(subject: TrainerSubject, *, freeze: bool, factor: float = 1.0) -> list[Recording]:
    """Return recordings of the optimizers that make an update. Gradients are multiplied by `factor`."""
    run = subject.run()
    for p in run.model.parameters() if factor != 1.0 else ():
        if p.requires_grad:
            p.register_hook(lambda g: g * factor)  # type: ignore[no-untyped-call]
    try:
        with subject.fixed_randomness(), recorded(run) as recordings:
            for number in range(min(_STEPS, subject.spec.total_steps or _STEPS)):
                with _frozen(run) if freeze and number in _FROZEN_STEPS else nullcontext():
                    run.step(subject.batch(number))
    except Exception as error:
        reraise_if_out_of_memory(error)
        if not freeze:
            raise
        raise UnmeasuredError(f"needs a step with frozen parameters: {reason_of(error)}") from error
    updated = [each for each in recordings if each.changes]
    return needed(updated, "a torch optimizer whose step() is called")


@contextmanager
def _frozen(run: TrainingRun, zero_gradients: bool = False) -> Iterator[set[int]]:
    """Freeze the last parameter of each group, and then train it again. The context is the set of their ids.

    If `zero_gradients`, they get a gradient of zero just before each call of `optimizer.step`.
    """
    chosen: list[nn.Parameter] = []
    for group in run.optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad]
        chosen += trained[-1:] if len(trained) > 1 else []
    for p in chosen:
        p.requires_grad_(False)
        p.grad = None

    def give_zeros(_: object) -> None:
        for p in chosen if zero_gradients else ():
            p.grad = torch.zeros_like(p)

    try:
        with each_update(run.optimizer, give_zeros):
            yield {id(p) for p in chosen}
    finally:
        for p in chosen:
            p.requires_grad_(True)

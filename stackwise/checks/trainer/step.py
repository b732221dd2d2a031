"""Step: a call changes the trained parameters only, and does not affect the next call."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from stackwise.checks.probe.applicable import needed, trainer_check
from stackwise.checks.probe.call import reason_of, refusals
from stackwise.checks.probe.growth import growth_result
from stackwise.checks.probe.run_state import different
from stackwise.checks.probe.update import Observation, distance, observed, train, weights_of
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import TrainingRun

_STEPS = 3
_STALE = 1e-3


@trainer_check
def parameters_change(subject: TrainerSubject) -> CheckResult:
    """Does a step change every parameter with a gradient, and no frozen parameter?"""
    run = subject.run()
    start = weights_of(run)
    seen = train(subject, run, _STEPS)
    now = dict(run.model.named_parameters())
    changed = {name for name, p in now.items() if not torch.equal(p.detach(), start[name])}
    frozen = {name for name in now if subject.is_frozen(name)}
    without = {name for name, p in now.items() if not p.requires_grad}

    def failed(names: list[str], **text: str) -> CheckResult:
        return subject.failed(len(names), 0.0, where=listed(names), **text)

    if moved := sorted(changed & (frozen | _frozen_and_optimized(seen))):
        return failed(
            moved,
            meaning=f"Frozen parameters that changed in {_STEPS} steps: {len(moved)}.",
            advice="Do not pass frozen parameters to the optimizer: its weight decay changes them.",
        )
    needed(seen.updates, f"an update in {_STEPS} steps; the optimizer was not called")
    if not any(update.has_rate for update in seen.updates):
        return subject.warned(
            0.0,
            meaning=f"No parameter is trained: the learning rate of the first {_STEPS} updates is 0.",
            correct_if="the schedule starts later on purpose",
            advice="Look at the first values of the schedule.",
        )
    if still := sorted(seen.reached - changed - frozen - without - _excused(run, seen)):
        missing = _not_in_optimizer(run).intersection(still)
        return failed(
            still,
            meaning=f"{len(still)} of {len(now)} parameters have a gradient, but did not change in {_STEPS} "
            f"steps. Of these, {len(missing)} are not in the optimizer.",
            advice="Create the optimizer from the model that trains, after this model is wrapped and moved, "
            "its weights are tied and its head is replaced. Look for a learning rate of 0 in a group.",
        )
    left_out = sorted(without - frozen - changed)
    if left_out and subject.spec.frozen is not None:
        return failed(
            left_out,
            meaning=f"Frozen parameters that are not declared frozen: {len(left_out)} of {len(now)}.",
            advice="Freeze by full names: a pattern may match too many parameters.",
        )
    silent = len(now.keys() - without - seen.reached)
    note = f"Trainable parameters without a gradient: {silent}." if silent else ""
    return subject.passed(0.0, 0.0, meaning=note)


def _frozen_and_optimized(seen: Observation) -> set[str]:
    """Return the parameters that an update changes although they are frozen.

    A parameter that other code changes, such as an average of the weights, is not frozen.
    """
    return {
        name
        for update in seen.updates
        for name in update.frozen
        if not torch.equal(update.before[name], update.after[name])
    }


def _excused(run: TrainingRun, seen: Observation) -> set[str]:
    """Return the parameters with a gradient that may stay unchanged."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    groups = [[id(p) for p in group["params"]] for group in run.optimizer.param_groups]
    # A group may start to train later.
    waiting = {
        names[key]
        for index, keys in enumerate(groups)
        if all(update.learning_rates[index : index + 1] == [0.0] for update in seen.updates)
        for key in keys
        if key in names
    }
    # Updates of half-precision weights may round to 0; the optimizer family checks them.
    narrow = {n for n, p in run.model.named_parameters() if p.dtype in (torch.bfloat16, torch.float16)}
    has_masters = any(key not in names for keys in groups for key in keys)
    return waiting | (narrow if has_masters else narrow - _not_in_optimizer(run))


def _not_in_optimizer(run: TrainingRun) -> set[str]:
    held = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    return {name for name, p in run.model.named_parameters() if id(p) not in held}


@trainer_check
def fresh_gradients(subject: TrainerSubject) -> CheckResult:
    """Does each update use a new gradient, which depends only on the batch of its step?"""
    gradients: dict[bool, list[dict[str, Tensor]]] = {False: [], True: []}
    for cleared, found in gradients.items():
        run = subject.run()
        for number in range(_STEPS):
            with subject.fixed_randomness(), observed(run) as seen:
                run.step(subject.batch(number))
            needed(not number or seen.updates, "an update in each step; the optimizer was not called")
            repeated = sum(
                bool(one.gradients) and not different(one.gradients, other.gradients)
                for one, other in pairwise(seen.updates)
            )
            if repeated:
                return subject.failed(
                    float(repeated),
                    0.0,
                    where="optimizer.step()",
                    meaning=f"Of {len(seen.updates)} updates of a step, one repeats the previous gradient.",
                    advice="Look for a second optimizer.step() without a backward pass between the calls. It "
                    "makes the update about twice as large, and adds each gradient to the moments twice.",
                )
            found += [seen.updates[-1].gradients] if number else []
            if cleared:
                for p in run.model.parameters():
                    p.grad = None
    value = 0.0
    for number, (one, other) in enumerate(zip(*gradients.values(), strict=True), start=2):
        value = max(value, distance(one, other))
        if value > _STALE:
            gaps = {n: distance({n: one[n]} if n in one else {}, {n: g}) for n, g in other.items()}
            return subject.failed(
                value,
                _STALE,
                where=max(gaps, key=lambda name: gaps[name], default=""),
                meaning=f"The gradient of step {number} is different after gradients are cleared before it.",
                advice="The gradient contains gradients of earlier steps: zero_grad is missing, depends on a "
                "condition, or clears other parameters than those of the backward pass.",
            )
    return subject.passed(value, _STALE)


@trainer_check
def step_memory(subject: TrainerSubject) -> CheckResult:
    """Is the number of live tensors, autograd nodes and hooks constant over equal steps?"""
    run, batch = subject.run(), subject.batch()

    def step() -> None:
        with subject.fixed_randomness():
            run.step(batch)

    try:
        return growth_result(subject, {"step": step})
    except refusals() as error:  # such as a schedule that is over
        return subject.not_applicable(f"needs a run that takes more steps: {reason_of(error)}")

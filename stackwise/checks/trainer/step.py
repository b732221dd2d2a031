"""Step: a call changes the trained parameters only, and does not affect the next call."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from stackwise.checks.check import trainer_check
from stackwise.checks.probe.call import reason_of, refusals
from stackwise.checks.probe.dropout import WithoutDropout
from stackwise.checks.probe.growth import growth_result
from stackwise.checks.probe.run_state import different, number_in
from stackwise.checks.probe.update import distance, observed
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import TrainingRun
from stackwise.support.system_errors import is_out_of_memory

_STEPS = 3
_STALE = 1e-3
_SAME_LOSS = 1e-3


@trainer_check
def parameters_change(subject: TrainerSubject) -> CheckResult:
    """Does a step change every parameter with a gradient, and no frozen parameter?"""
    run = subject.run()
    start = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    with subject.fixed_randomness(), observed(run) as seen:
        for number in range(_STEPS):
            run.step(subject.batch(number))
    now = dict(run.model.named_parameters())
    changed = {name for name, p in now.items() if not torch.equal(p.detach(), start[name])}
    frozen = {name for name in now if subject.is_frozen(name)}
    # A parameter that other code changes, such as an average of the weights, is not frozen.
    optimized = {
        name
        for update in seen.updates
        for name in update.frozen
        if not torch.equal(update.before[name], update.after[name])
    }
    moved = sorted(name for name in changed if name in frozen | optimized)
    if moved:
        return subject.failed(
            len(moved),
            0.0,
            where=listed(moved),
            meaning=f"Frozen parameters that changed in {_STEPS} steps: {len(moved)}.",
            advice="Set requires_grad before the optimizer is created, and do not pass frozen parameters to "
            "it: its weight decay changes them.",
        )
    if not seen.updates:
        return subject.not_applicable(f"needs an update in {_STEPS} steps; the optimizer was not called")
    # Updates of half-precision weights may round to 0; the optimizer family checks them.
    narrow = {name for name, p in now.items() if p.dtype in (torch.bfloat16, torch.float16)}
    # A group may start to train later.
    waiting = {
        name
        for index, names in enumerate(_groups(run))
        if not any(update.learning_rates[index : index + 1] != [0.0] for update in seen.updates)
        for name in names
    }
    still = sorted(
        name for name in seen.reached - changed - frozen - narrow - waiting if now[name].requires_grad
    )
    if not any(rate > 0 for update in seen.updates for rate in update.learning_rates):
        return subject.warned(
            0.0,
            meaning=f"No parameter is trained: the learning rate of the first {_STEPS} updates is 0.",
            correct_if="the schedule starts later on purpose",
            advice="Look at the first values of the schedule.",
        )
    if still:
        return subject.failed(
            len(still),
            0.0,
            where=listed(still),
            meaning=f"{len(still)} of {len(now)} parameters have a gradient, but did not change in {_STEPS} "
            "steps.",
            advice="Look for an optimizer that was created before the model was wrapped or a head was "
            "replaced, for a learning rate of 0 in their group, and for updates that round to 0 in half "
            "precision.",
        )
    left_out = sorted(
        name for name, p in now.items() if not p.requires_grad and name not in frozen and name not in changed
    )
    if left_out and subject.spec.frozen is not None:
        return subject.failed(
            len(left_out),
            0.0,
            where=listed(left_out),
            meaning=f"{len(left_out)} of {len(now)} parameters do not require gradients, and are not "
            "declared frozen.",
            advice="Freeze by full names: a pattern may match too many parameters.",
        )
    silent = len([p for name, p in now.items() if p.requires_grad and name not in seen.reached])
    note = f"Trainable parameters without a gradient: {silent}." if silent else ""
    return subject.passed(0.0, 0.0, meaning=note)


@trainer_check
def fresh_gradients(subject: TrainerSubject) -> CheckResult:
    """Does the gradient of each later step depend on its own batch only?"""
    gradients: dict[bool, list[dict[str, Tensor]]] = {}
    for cleared in (False, True):
        run = subject.run()
        gradients[cleared] = []
        for number in range(_STEPS):
            with subject.fixed_randomness(), observed(run) as seen:
                run.step(subject.batch(number))
            if number and not seen.updates:
                return subject.not_applicable("needs an update in each step; the optimizer was not called")
            gradients[cleared] += [seen.updates[-1].gradients] if number else []
            if cleared:
                for p in run.model.parameters():
                    p.grad = None
    value = 0.0
    for number, (found, wanted) in enumerate(zip(gradients[False], gradients[True], strict=True), start=2):
        value = max(value, distance(found, wanted))
        if value > _STALE:
            apart = {name: distance(_one(found, name), _one(wanted, name)) for name in wanted}
            return subject.failed(
                value,
                _STALE,
                where=max(apart, key=lambda name: apart[name]) if apart else "",
                meaning=f"The gradient of step {number} differs from that of the same batch after the "
                "gradients were cleared.",
                advice="The gradient contains gradients of earlier steps: zero_grad is missing, depends on a "
                "condition, or clears other parameters than those of the backward pass.",
            )
    return subject.passed(value, _STALE)


@trainer_check
def single_update(subject: TrainerSubject) -> CheckResult:
    """Does a step call the optimizer once?"""
    run = subject.run()
    most, repeated = 0, False
    with subject.fixed_randomness():
        for number in range(_STEPS):
            with observed(run) as seen:
                run.step(subject.batch(number))
            most = max(most, len(seen.updates))
            for one, other in pairwise(seen.updates):
                repeated |= bool(one.gradients) and not different(one.gradients, other.gradients)
    if not most:
        return subject.not_applicable(f"needs an update in {_STEPS} steps; the optimizer was not called")
    if most == 1:
        return subject.passed(1.0, 1.0)
    if repeated:
        return subject.failed(
            most,
            1.0,
            where="optimizer.step()",
            meaning=f"A step makes {most} updates, one of them with the same gradient as the one before.",
            advice="Look for a second optimizer.step() without a backward pass between the calls. It makes "
            "the update about twice as large, and adds each gradient to the moments twice.",
        )
    return subject.warned(
        most,
        1.0,
        where="optimizer.step()",
        meaning=f"One step makes {most} updates, each with a gradient of its own.",
        correct_if="one batch is meant for several updates",
        advice="Step the optimizer after the last micro-batch only.",
    )


@trainer_check
def step_loss(subject: TrainerSubject) -> CheckResult:
    """Does a step return the loss before its update?"""
    run = subject.run()
    if not subject.has(run, "loss"):
        return subject.not_applicable("needs loss(batch)")
    batch = subject.batch()

    def loss() -> float:
        run.model.train()
        with subject.fixed_randomness(), torch.no_grad():
            return float(run.loss(batch))  # type: ignore[attr-defined]

    with WithoutDropout():
        before = loss()
        with subject.fixed_randomness():
            returned = number_in(run.step(batch))
        if returned is None:
            return subject.not_applicable("needs a step that returns its loss")
        after = loss()
    if not math.isfinite(before):
        return subject.not_applicable(f"needs a finite loss; it is {before}")
    value = abs(returned - before) / max(abs(before), 1e-12)
    if value <= max(_SAME_LOSS, 0.01 * _rounding(run)):
        return subject.passed(value, _SAME_LOSS)
    limit = _SAME_LOSS
    if abs(returned - after) < 0.1 * abs(after - before):
        return subject.failed(
            value,
            limit,
            where="the result of step(batch)",
            meaning=f"The step returned {returned:.6g}, the loss after the update. The loss before the "
            f"update was {before:.6g}.",
            advice="Return the loss of the backward pass, and do not compute it again after the update.",
        )
    return subject.warned(
        value,
        limit,
        where="the result of step(batch)",
        meaning=f"The step does not return its training loss: it returned {returned:.6g}, and loss(batch) "
        f"was {before:.6g} before the step.",
        correct_if="the loss is scaled for accumulation, or by the loss scale, on purpose",
        advice="Return the unscaled loss: otherwise curves of different runs cannot be compared.",
    )


@trainer_check
def step_memory(subject: TrainerSubject) -> CheckResult:
    """Do equal steps leave no more tensors, autograd nodes and hooks each time?"""
    run, batch = subject.run(), subject.batch()

    def step() -> None:
        with subject.fixed_randomness():
            run.step(batch)

    try:
        return growth_result(subject, step, "step")
    except refusals() as error:  # such as a schedule that is over
        return subject.not_applicable(f"needs a run that takes more steps: {reason_of(error)}")


@trainer_check
def non_finite_gradient(subject: TrainerSubject) -> CheckResult:
    """Does a step skip the update after a non-finite gradient, if the run has a scaler?"""
    run = subject.run()
    trained = [p for p in run.model.parameters() if p.requires_grad]
    if not trained:
        return subject.not_applicable("needs a trainable parameter")
    with subject.fixed_randomness():
        run.step(subject.batch(0))
    start = [p.detach().clone() for p in run.model.parameters()]
    handle = trained[0].register_hook(lambda g: g * math.nan)  # type: ignore[no-untyped-call]
    try:
        with subject.fixed_randomness():
            run.step(subject.batch(1))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if (reason := _raised_by_the_hook(subject)) is not None:
            return subject.not_applicable(f"needs a gradient that a hook may change: {reason}")
        text = " ".join(str(error).split())[:160]
        return subject.passed(meaning=f"The step raises {type(error).__name__}: {text}")
    finally:
        handle.remove()
    parameters: list[nn.Parameter] = list(run.model.parameters())
    if all(torch.equal(p.detach(), was) for p, was in zip(parameters, start, strict=True)):
        if not _second_step_updates(subject):
            return subject.not_applicable("needs an update in the second step")
        return subject.passed(0.0, meaning="The update is skipped.")
    n_non_finite = sum(int((~p.detach().isfinite()).sum()) for p in parameters)
    share = n_non_finite / sum(p.numel() for p in parameters)
    meaning = f"The update is not skipped: {100 * share:.3g} % of the weights are not finite afterwards."
    if n_non_finite and subject.scales(run):
        return subject.failed(
            share,
            0.0,
            where="the update after a gradient that is not finite",
            meaning=meaning,
            advice="Call scaler.step(optimizer) instead of optimizer.step(): it skips updates with "
            "overflowed gradients, which a loss scale causes regularly.",
        )
    return subject.not_applicable(
        f"needs a scaler, or a step that skips the update: {100 * share:.3g} % of the weights are not finite "
        "afterwards"
    )


def _second_step_updates(subject: TrainerSubject) -> bool:
    run = subject.run()
    with subject.fixed_randomness():
        run.step(subject.batch(0))
        start = [p.detach().clone() for p in run.model.parameters()]
        run.step(subject.batch(1))
    return not all(map(torch.equal, start, run.model.parameters()))


def _raised_by_the_hook(subject: TrainerSubject) -> str | None:
    """Return the error of a second step with a hook that does not change the gradient, or None.

    Raises:
        Exception: the second step raises without a hook as well, so that the step itself is broken.
    """
    for hooked in (False, True):
        run = subject.run()
        with subject.fixed_randomness():
            run.step(subject.batch(0))
        if hooked:
            first = next(p for p in run.model.parameters() if p.requires_grad)
            first.register_hook(lambda g: g * 1.0)  # type: ignore[no-untyped-call]
        try:
            with subject.fixed_randomness():
                run.step(subject.batch(1))
        except Exception as error:
            if not hooked or is_out_of_memory(error):
                raise
            return reason_of(error)
    return None


def _groups(run: TrainingRun) -> list[set[str]]:
    """Return the names of the parameters of each group."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    return [{names[id(p)] for p in group["params"] if id(p) in names} for group in run.optimizer.param_groups]


def _rounding(run: TrainingRun) -> float:
    """Return 1 if weights are in half precision, otherwise 0."""
    return float(any(p.dtype in (torch.bfloat16, torch.float16) for p in run.model.parameters()))


def _one(gradients: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {name: gradients[name]} if name in gradients else {}

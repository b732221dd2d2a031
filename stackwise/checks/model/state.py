"""State: changes that a call leaves in the model, in its arguments and in global settings."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import nn

from stackwise.checks.check import check
from stackwise.checks.model.equivalence import explored, simplest
from stackwise.checks.probe.difference import same_bits
from stackwise.checks.probe.growth import growth_result
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.subject import Subject


@check
def eval_buffers(subject: Subject) -> CheckResult:
    """Are all buffers unchanged if a call in eval mode is repeated?"""
    model = subject.model()
    with torch.no_grad(), subject.fixed_randomness():
        # The first call may compute a table or fill a cache. The same call again adds nothing to them.
        subject.spec.logits(model, subject.inputs(2))
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        subject.spec.logits(model, subject.inputs(2))
    changed = [
        name
        for name, buffer in model.named_buffers()
        if name in before and buffer.shape == before[name].shape and not same_bits(buffer, before[name])
    ]
    if not changed:
        return subject.passed(0.0, 0.0)
    return subject.failed(
        float(len(changed)),
        0.0,
        where=listed(changed),
        meaning="A call in eval mode changes buffers, so an evaluation changes the model.",
        advice="Update statistics and counters only if self.training is True. Keep caches out of buffers.",
    )


@check
def side_effects(subject: Subject) -> CheckResult:
    """Does a call change no argument, mode or global setting, and seed no global random generator?"""
    exploration = explored(subject)
    if exploration.effects:
        return simplest(subject, exploration.effects)
    if not exploration.executed:
        return subject.not_applicable(next(iter(exploration.missing.values()), "needs a repeatable model"))
    return subject.passed(0.0, 0.0, meaning=f"compared in {exploration.executed} compositions")


@check
def memory_growth(subject: Subject) -> CheckResult:
    """Is the number of live tensors, autograd nodes and hooks constant over equal calls and steps?"""
    inputs = subject.inputs(2)

    def evaluate(model: nn.Module) -> None:
        with subject.fixed_randomness(), torch.no_grad():
            subject.spec.logits(model, inputs.clone())

    def train(model: nn.Module) -> None:
        with subject.fixed_randomness(), torch.enable_grad():
            if (loss := subject.spec.loss_of(model, inputs.clone())).requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad(set_to_none=True)

    calls = {
        "call in eval mode": partial(evaluate, subject.model()),
        "training step": partial(train, subject.model(train=True)),
    }
    with warnings.catch_warnings(action="ignore"):
        return growth_result(subject, calls)

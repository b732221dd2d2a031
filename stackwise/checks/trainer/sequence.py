"""Sequence: operations between the steps of a run do not change the steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from stackwise.checks.check import trainer_check
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.runs.averages import averages_of
from stackwise.checks.runs.sequence import INTERRUPTIONS, OPERATIONS, Sequences
from stackwise.checks.trainer.checkpoint import checkpoint_round_trip, resume, saving_disturbs_nothing
from stackwise.checks.trainer.evaluation import evaluation_restores
from stackwise.checks.trainer_subject import TrainerSubject

# Steps in which an average changes. Some are updated in each fifth or tenth step.
_STEPS = 12
_OTHERS = tuple(name for name in OPERATIONS if name not in INTERRUPTIONS)


@trainer_check
def interrupted_run(subject: TrainerSubject) -> CheckResult:
    """Does a run that is saved and loaded at any step, or several times, end like the straight run?"""
    return _compared(
        subject,
        INTERRUPTIONS,
        (checkpoint_round_trip, resume),
        "Save everything that later steps and evaluate() use: counters, averages of the weights and their "
        "number of updates, and the position in the data, which is 0 again in the next epoch.",
    )


@trainer_check
def undisturbed_run(subject: TrainerSubject) -> CheckResult:
    """Does a run that is evaluated or saved between any steps end like the straight run?"""
    return _compared(
        subject,
        _OTHERS,
        (evaluation_restores, saving_disturbs_nothing),
        "Look for counters, modes, gradients and iterators that the operation shares with the training step.",
    )


@trainer_check
def average_follows(subject: TrainerSubject) -> CheckResult:
    """Does an average of the weights, or a target network, change during training?"""
    run = subject.run()
    start = [p.detach().clone() for p in run.model.parameters()]
    before = {name: value for name, value in averages_of(run).items() if _is_copy(value, start)}
    if not before:
        return subject.not_applicable("needs a copy of the weights in an attribute of the run")
    with subject.fixed_randomness():
        for number in range(_STEPS):
            run.step(subject.batch(number))
    if all(torch.equal(p, old) for p, old in zip(run.model.parameters(), start, strict=True)):
        return subject.not_applicable(f"needs a weight that {_STEPS} steps change")
    after = averages_of(run)
    still = [name for name, value in before.items() if name in after and torch.equal(value, after[name])]
    if len(still) < len(before):
        return subject.passed(meaning=f"{len(before)} tensors.")
    return subject.warned(
        0.0,
        where=listed(still),
        meaning=f"A copy of the weights did not change in {_STEPS} steps, in which the weights did.",
        correct_if="it is a reference model, or it is updated less often",
        advice="Look for a decay of 1, and for a copy without parameters that the update could change.",
    )


def _is_copy(value: Tensor, weights: list[Tensor]) -> bool:
    """Return True if a tensor is equal to a weight. A norm of ones or a bias of zeros does not show this."""
    if value.numel() == 0 or torch.equal(value, value.flatten()[0].expand(value.shape)):
        return False
    return any(value.shape == p.shape and torch.equal(value, p.to(value.dtype)) for p in weights)


@lru_cache(maxsize=1)
def _sequences(subject: TrainerSubject) -> Sequences:
    """Return the sequences that both checks share."""
    return Sequences(subject)


def _compared(
    subject: TrainerSubject,
    operations: tuple[str, ...],
    simple: tuple[Callable[[TrainerSubject], CheckResult], ...],
    advice: str,
) -> CheckResult:
    """Compare the sequences with some operations. If a simple check fails, it reports the difference."""
    sequences = _sequences(subject)
    if set(operations).isdisjoint(sequences.possible):
        needs = sorted({member for name in operations for member in OPERATIONS[name][0]})
        return subject.not_applicable(f"needs one of the methods {', '.join(needs)}")
    if not sequences.repeats:
        return subject.not_applicable("needs a step that repeats itself: two runs of one seed differ")
    finding, count = sequences.find(operations)
    if finding is None:
        return subject.passed(0.0, 0.0, meaning=f"{count} sequences of {sequences.n_steps} steps.")
    for check in simple:
        if check(subject).status == "failed":
            return subject.not_applicable(f"needs a run without this failure: see {check.__name__}")
    return subject.failed(
        1.0,
        0.0,
        where=finding.difference,
        meaning=f"A run does not end like the straight run if {finding.text}.",
        advice=f"{advice} To repeat it: {finding.code}",
    )

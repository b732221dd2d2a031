"""Sequence: operations between the steps of a run do not change the steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from stackwise.checks.check import trainer_check
from stackwise.checks.result import CheckResult
from stackwise.checks.runs.sequence import INTERRUPTIONS, OPERATIONS, Sequences
from stackwise.checks.trainer.checkpoint import checkpoint_round_trip, resume, saving_disturbs_nothing
from stackwise.checks.trainer.evaluation import evaluation_restores
from stackwise.checks.trainer_subject import TrainerSubject

_OTHERS = tuple(name for name in OPERATIONS if name not in INTERRUPTIONS)


@trainer_check
def interrupted_run(subject: TrainerSubject) -> CheckResult:
    """Does a run that is saved and loaded at any step, or several times, end like an uninterrupted run?"""
    return _compared(
        subject,
        INTERRUPTIONS,
        (checkpoint_round_trip, resume),
        "Save everything that later steps and evaluate() use: counters, averages of the weights and their "
        "number of updates, and the position in the data, which starts at 0 in the next epoch.",
    )


@trainer_check
def undisturbed_run(subject: TrainerSubject) -> CheckResult:
    """Does a run that is evaluated or saved between any steps end like an uninterrupted run?"""
    return _compared(
        subject,
        _OTHERS,
        (evaluation_restores, saving_disturbs_nothing),
        "Look for counters, modes, gradients and iterators that the operation shares with the training step.",
    )


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
        return subject.not_applicable("needs a deterministic step: two runs with the same seed differ")
    finding, count = sequences.find(operations)
    if finding is None and not count:
        return subject.not_applicable("needs an operation that raises no exception after the first step")
    if finding is None:
        return subject.passed(0.0, 0.0, meaning=f"{count} sequences of {sequences.n_steps} steps.")
    for check in simple:
        if check(subject).status == "failed":
            return subject.not_applicable(f"needs a run that passes {check.__name__}")
    return subject.failed(
        1.0,
        0.0,
        where=finding.difference,
        meaning=f"A run does not end like an uninterrupted run if {finding.text}.",
        advice=f"{advice} To repeat it: {finding.code}",
    )

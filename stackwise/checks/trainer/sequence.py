"""Sequence: operations between the steps of a run do not change the steps."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from stackwise.checks.probe.another_process import Recipe, run_in_processes
from stackwise.checks.probe.applicable import needed, trainer_check
from stackwise.checks.probe.run_state import Trace
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.runs.sequence import INTERRUPTIONS, OPERATIONS, Finding, Sequences, resumed
from stackwise.checks.trainer_subject import TrainerSubject

_OTHERS = tuple(name for name in OPERATIONS if name not in INTERRUPTIONS)


@trainer_check
def interrupted_run(subject: TrainerSubject) -> CheckResult:
    """Does a run that is saved and loaded at any step, or several times, end like an uninterrupted run?"""
    return _compared(subject, INTERRUPTIONS)


@trainer_check
def undisturbed_run(subject: TrainerSubject) -> CheckResult:
    """Does a run that is evaluated or saved between any steps end like an uninterrupted run?"""
    return _compared(subject, _OTHERS)


@trainer_check(suite="full")
def resume_in_new_process(subject: TrainerSubject) -> CheckResult:
    """Does a run that is continued in a new process end like an uninterrupted run?"""
    needed(subject.has(subject.run(), "save", "load"), "the methods load, save")
    recipe = needed(
        Recipe.of(subject.spec),
        "TrainerSpec.factory, or a build function that can be pickled (at top level of a module)",
    )
    needed(interrupted_run(subject).status == "passed", "a run that passes interrupted_run")

    def resume(**arguments: Any) -> Trace:
        arguments |= {"device": str(subject.device), "seed": subject.seed}
        [outcome] = run_in_processes(f"{resumed.__module__}:resumed", recipe, [arguments])
        needed(outcome.built, f"a run that a new process can set up; error: {outcome.error}")
        if outcome.error:
            raise _ProcessError(outcome.error)
        return outcome.value  # type: ignore[no-any-return]

    try:
        difference = _sequences(subject).resumed_elsewhere(resume)
    except _ProcessError as error:
        difference = f"the new process raises {error}"
    return subject.at_most(
        float(bool(difference)),
        0.0,
        where=difference,
        meaning="A run that a new process continues does not end like an uninterrupted run. In one process, "
        "it does.",
        advice="Save everything that the run stores in classes, modules, files or caches of the process, and "
        "do not depend on hash() of strings or the order of sets.",
    )


class _ProcessError(Exception):
    """The new process could not continue the run."""


@lru_cache(maxsize=1)
def _sequences(subject: TrainerSubject) -> Sequences:
    """Return the sequences that both checks share."""
    return Sequences(subject)


def _compared(subject: TrainerSubject, operations: tuple[str, ...]) -> CheckResult:
    """Compare the sequences with some operations."""
    sequences = _sequences(subject)
    members = sorted({member for name in operations for member in OPERATIONS[name][0]})
    is_possible = not set(operations).isdisjoint(sequences.possible)
    needed(is_possible, f"one of the methods {', '.join(members)}")
    needed(sequences.repeats, "a deterministic step: two runs with the same seed differ")
    finding, count = sequences.find(operations)
    if finding is None:
        return subject.passed(0.0, 0.0, meaning=f"{count} sequences of {sequences.n_steps} steps.")
    is_theirs = not set(operations).isdisjoint(finding.sequence)
    needed(is_theirs, "a run that passes undisturbed_run")
    return subject.failed(
        float(max(1, len(finding.lost))),
        0.0,
        where=finding.difference,
        meaning=f"A run does not end like an uninterrupted run if {finding.text}."
        + (f" State that differs after loading: {listed(finding.lost)}." if finding.lost else ""),
        advice=f"{_advice(finding)} To repeat it: {finding.code}",
    )


def _advice(finding: Finding) -> str:
    """Return the probable cause of a difference."""
    if set(INTERRUPTIONS).isdisjoint(finding.sequence):
        return (
            "Evaluate in eval mode under torch.no_grad(), and restore the mode of each module. Look for "
            "weights that saving casts, moves or replaces, and for random numbers that it draws."
        )
    if finding.lost:
        name, (saved, loaded) = next(iter(finding.lost.items()))
        return _advice_on_lost(name, saved, loaded, is_used="rewind" in finding.sequence)
    if finding.is_random:
        return (
            "Save and load the random states (torch.get_rng_state, of every CUDA device, random.getstate, "
            "numpy's): dropout and augmentation draw from them."
        )
    if finding.difference.startswith(("batch", "position()")):
        return (
            "Save the position in the data (epoch and used batches), and pass the epoch to the sampler "
            "(set_epoch). If the global generator draws the order, save its state at the start of the epoch."
        )
    if finding.difference.startswith("the learning rate"):
        return "Save and load the step number, because the learning rate depends on it."
    if finding.difference.startswith("the sequence raises"):
        return "Look for names that a wrapper or torch.compile changes, and for state that training adds."
    return (
        "Save everything that later steps and evaluate() use: counters, averages of the weights and their "
        "number of updates, buffers, and gradients of earlier steps."
    )


def _advice_on_lost(name: str, saved: Any, loaded: Any, *, is_used: bool) -> str:
    """Return the probable cause of an entry of the state that a checkpoint does not restore."""
    part = name.partition(".")[0]
    if is_used:
        return "After loading, state of the earlier training remains: clear or replace it."
    if name == "model: weights that share memory":
        return (
            "Tied weights are two tensors after loading: tie them after the load, and do not use assign=True."
        )
    if part == "scheduler" or name.startswith("optimizer.group"):
        return "Save and load the scheduler's state_dict; without it the schedule restarts."
    if part == "scaler":
        return "Save and load the GradScaler's state_dict; without it the first steps overflow."
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        if saved.dtype != loaded.dtype:
            return "The dtype changed. Optimizer.load_state_dict casts state to that of its parameter."
        if saved.shape == loaded.shape and torch.equal(saved.bfloat16(), loaded.bfloat16()):
            return "The values are rounded to 16 bits: save them in the dtype in which the run trains."
    if part == "optimizer":
        return "Save and load the optimizer's state_dict, after its parameter groups are restored."
    return (
        "Look for names that strict=False skips (a prefix of a wrapper such as module. or _orig_mod.), for a "
        "copy that is older than the last optimizer step, and for frozen or tied weights that are not saved."
    )

"""Replay: each update is the one that an optimizer makes which holds this parameter alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from stackwise.checks.check import trainer_check
from stackwise.checks.probe.call import reason_of
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.runs.replay import options_without_effect, recorded, replayed
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import TrainingRun
from stackwise.support.system_errors import reraise_if_out_of_memory

# Implementations for one parameter and for many round differently.
_LIMIT = 0.05
_STEPS = 9
# Steps in which some parameters do not train.
_FROZEN_STEPS = (2, 3, 6)


@trainer_check
def separate_updates(subject: TrainerSubject) -> CheckResult:
    """Is the update of each parameter independent of the others, also if some are frozen for a while?"""
    result = _compared(subject, freeze=False)
    if result.status != "passed":
        return result
    # The same with parameters that do not train for a while.
    return _compared(subject, freeze=True)


@trainer_check
def option_effects(subject: TrainerSubject) -> CheckResult:
    """Do momentum and weight decay of the optimizer have an effect?"""
    run = subject.run()
    with subject.fixed_randomness(), recorded(run) as recordings:
        for number in range(_STEPS):
            run.step(subject.batch(number))
    for recording in recordings:
        kind = type(recording.fresh).__name__
        try:
            ignored = options_without_effect(recording)
        except Exception as error:  # any exception means: not alone
            reraise_if_out_of_memory(error)
            return subject.not_applicable(f"needs {kind} to run with one parameter: {reason_of(error)}")
        if ignored:
            return subject.failed(
                0.0,
                where=f"{kind}: {', '.join(ignored)}",
                meaning=f"The updates of {kind} are the same with half of its {ignored[0]}.",
                advice="Look for a state that each step creates or clears again, and for an option that the "
                "update does not read.",
            )
    return subject.passed() if recordings else subject.not_applicable("needs a torch optimizer")


def _compared(subject: TrainerSubject, *, freeze: bool) -> CheckResult:
    run = subject.run()
    with subject.fixed_randomness(), recorded(run) as recordings:
        for number in range(_STEPS):
            is_frozen = freeze and number in _FROZEN_STEPS
            try:
                with _frozen(run) if is_frozen else nullcontext():
                    run.step(subject.batch(number))
            except Exception as error:
                reraise_if_out_of_memory(error)
                if not freeze:
                    raise
                return subject.not_applicable(f"needs a step with frozen parameters: {reason_of(error)}")
    recordings = [each for each in recordings if each.changes]
    if not recordings:
        return subject.not_applicable("needs a torch optimizer that is stepped")
    largest, count = 0.0, 0
    for recording in recordings:
        kind = type(recording.fresh).__name__
        try:
            found = replayed(recording)
        except Exception as error:  # any exception means: not alone
            reraise_if_out_of_memory(error)
            return subject.not_applicable(f"needs {kind} to run with one parameter: {reason_of(error)}")
        wrong = [each for each in found if each.gap > _LIMIT]
        count += len(found)
        if not wrong:
            largest = max(largest, *(each.gap for each in found))
            continue
        worst = max(wrong, key=lambda each: each.gap)
        # If all parameters train, a difference may be meant, such as clipping inside the optimizer.
        is_coupled = not freeze and not recording.has_pauses
        return subject.failed_unless(
            f"{kind} couples the parameters on purpose" if is_coupled else None,
            worst.gap,
            _LIMIT,
            where=f"{listed([each.name for each in wrong])}, update {worst.update}",
            meaning=f"{len(wrong)} of {len(found)} parameters get another update than from a {kind} that "
            f"holds this parameter alone. That of {worst.name} is {worst.length:.3g} times as long.",
            advice="Keep a counter and moments for each parameter. Those of another parameter are wrong as "
            "soon as one of the two had no gradient.",
        )
    return subject.passed(largest, _LIMIT, meaning=f"{count} parameters.")


@contextmanager
def _frozen(run: TrainingRun) -> Iterator[None]:
    """Freeze the last parameter of each group, and then train it again."""
    chosen: list[torch.Tensor] = []
    for group in run.optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad]
        chosen += trained[-1:] if len(trained) > 1 else []
    for p in chosen:
        p.requires_grad_(False)
        p.grad = None
    try:
        yield
    finally:
        for p in chosen:
            p.requires_grad_(True)

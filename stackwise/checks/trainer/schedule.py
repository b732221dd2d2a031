"""Schedule: each update has the learning rate that is declared for its number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from typing import Any

import torch

from stackwise.checks.check import trainer_check
from stackwise.checks.probe.update import each_update, observed, rates_of
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_adapter import schedulers_of
from stackwise.subject.trainer_spec import TrainingRun

_STEPS = 12
_SMALL = {"batch_size": 1, "seq_len": 4}
_ROUNDING = 1e-6
_MICRO_BATCHES = 3
# Updates of a full training that are counted.
_MOST_UPDATES = 300
_LONGEST_EPOCH = 1000
# Largest change of the ratio of two learning rates. A common minimum of a cosine changes the ratio.
_RATIO_CHANGE = 0.05


@trainer_check
def learning_rate(subject: TrainerSubject) -> CheckResult:
    """Does each update have the declared learning rate?"""
    claim = subject.spec.learning_rate
    if claim is None:
        return subject.not_applicable("needs learning_rate, the declared rate of each step")
    updates = _numbered_rates(subject, _STEPS, lambda run, batch: run.step(batch))
    if not updates:
        return subject.not_applicable(f"needs an update in {_STEPS} steps")
    rates = [rates for _, rates in updates]
    # A step without an update, such as one that a loss scale skips, may advance the schedule or not.
    counts = (range(len(updates)), [number for number, _ in updates])
    found = [_farthest(rates, [float(claim(number)) for number in numbers]) for numbers in counts]
    value, number, group, claimed = min(found)
    if value > _ROUNDING:
        return subject.failed(
            value,
            _ROUNDING,
            where=f"update {number}, group {group}: {rates[number][group]:.6g}, declared {claimed:.6g}",
            meaning=f"In {len(rates)} compared updates, a learning rate differs from the declared one. The "
            "measured difference is relative to the largest declared rate.",
            advice="Look for a counter of micro-batches or epochs instead of updates, at the order of "
            "scheduler.step() and optimizer.step(), and at the total number of steps of the schedule.",
        )
    return subject.passed(value, _ROUNDING)


def _farthest(rates: list[list[float]], claimed: list[float]) -> tuple[float, int, int, float]:
    """Return the largest relative difference from the claimed rates, its update and group, and the claim.

    Each group may multiply the declared rate by a factor, but one group must have the declared rate.
    """
    peak = max(map(abs, claimed)) or 1.0
    top = claimed.index(max(claimed))
    apart = {}
    for group, rate in enumerate(rates[top]):
        factor = rate / claimed[top] if claimed[top] else 1.0
        for number, each in enumerate(rates):
            apart[number, group] = abs(each[group] - factor * claimed[number]) / (peak * (abs(factor) or 1.0))
    closest = min(range(len(rates[top])), key=lambda group: abs(rates[top][group] - claimed[top]))
    for number, each in enumerate(rates):
        apart[number, closest] = abs(each[closest] - claimed[number]) / peak
    (number, group), value = max(apart.items(), key=lambda item: item[1])
    return value, number, group, claimed[number]


@trainer_check
def scheduler_per_update(subject: TrainerSubject) -> CheckResult:
    """Does the learning rate advance per update, and not per micro-batch?"""
    if not subject.has(subject.run(), "accumulate"):
        return subject.not_applicable("needs accumulate(batches)")
    n = _STEPS // 2
    single = _rates(subject, n, lambda run, batch: run.step(batch))
    several = _rates(subject, n, lambda run, batch: run.accumulate([batch] * _MICRO_BATCHES))  # type: ignore[attr-defined]
    if not single or len(single) != len(several):
        return subject.not_applicable("needs one update in each step() and in each accumulate()")
    peak = max(max(each, default=0.0) for each in single) or 1.0
    differences = [
        max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0) / peak
        for one, other in zip(single, several, strict=True)
    ]
    value = max(differences)
    if value > _ROUNDING:
        number = differences.index(value)
        return subject.failed(
            value,
            _ROUNDING,
            where=f"update {number}",
            meaning=f"The learning rate is {several[number][0]:.6g} with {_MICRO_BATCHES} micro-batches per "
            f"update, and {single[number][0]:.6g} with one.",
            advice="Step the scheduler once for each update, inside the same condition as the optimizer.",
        )
    return subject.passed(value, _ROUNDING)


@trainer_check
def scheduler_count(subject: TrainerSubject) -> CheckResult:
    """Is the scheduler stepped once per update?"""
    run = subject.run()
    if subject.spec.learning_rate is not None:
        return subject.not_applicable("needs a run without a declared learning rate: learning_rate applies")
    if not (before := _counts_of(run)):
        return subject.not_applicable("needs a scheduler that counts its steps, as torch schedulers do")
    start = before
    ratios: list[tuple[int, int]] = []
    with subject.fixed_randomness():
        for number in range(_STEPS // 2):
            seen: list[torch.optim.Optimizer] = []
            with each_update(run.optimizer, seen.append):
                run.step(subject.batch(number, **_SMALL))
            after = _counts_of(run)
            calls, places = (max(after.values())[part] - max(before.values())[part] for part in (0, 1))
            before = after
            if seen:  # each of several optimizers may make an update
                ratios.append((calls or places, max(Counter(map(id, seen)).values())))
    steps, updates = (sum(ratio[part] for ratio in ratios) for part in (0, 1))
    if not steps:
        return subject.not_applicable(f"needs a scheduler that is stepped in the first {_STEPS // 2} updates")
    meaning = f"{steps} steps of the scheduler in {updates} updates."
    if all(stepped > made for stepped, made in ratios):
        return subject.failed(
            steps / updates,
            1.0,
            where="scheduler.step()",
            meaning=meaning,
            advice="Call scheduler.step() once after each update. A loop and a library that it uses may both "
            "call it, and the schedule then ends too early.",
        )
    if idle := [name for name, count in before.items() if count == start[name]]:
        return subject.warned(
            0.0,
            1.0,
            where=listed(idle),
            meaning=f"This scheduler is not stepped in {updates} updates, but another scheduler is.",
            correct_if="it is stepped once per epoch, or its optimizer makes no updates yet",
            advice="Call step() of each scheduler.",
        )
    return subject.passed(steps / updates, 1.0, meaning=meaning)


@trainer_check
def scheduler_order(subject: TrainerSubject) -> CheckResult:
    """Does the first update use the first learning rate of the scheduler, and is this rate above 0?"""
    run = subject.run()
    planned = rates_of(run.optimizer)
    with subject.fixed_randomness(), observed(run) as seen:
        run.step(subject.batch(0))
    if not seen.updates or not planned:
        return subject.not_applicable("needs an update in the first step")
    rates = seen.updates[0].learning_rates
    value = max(abs(a - b) for a, b in zip(rates, planned, strict=False)) / (max(map(abs, planned)) or 1.0)
    of_torch = any(isinstance(s, torch.optim.lr_scheduler.LRScheduler) for s in schedulers_of(run).values())
    if of_torch and value > _ROUNDING:
        return subject.failed(
            value,
            _ROUNDING,
            where="update 0",
            meaning=f"The scheduler begins at {planned[0]:.6g}, but the first update used {rates[0]:.6g}.",
            advice="Call scheduler.step() after optimizer.step(). Otherwise the first learning rate is never "
            "used.",
        )
    if not any(rates):
        return subject.warned(
            0.0,
            where="update 0",
            meaning="The first update has no effect: its learning rate is 0.",
            correct_if="the schedule starts at 0 on purpose",
            advice="Start a warm-up of N steps at 1/N of the largest rate.",
        )
    return subject.passed(value, _ROUNDING)


@trainer_check
def group_rates(subject: TrainerSubject) -> CheckResult:
    """Do parameter groups with different learning rates keep the ratio of these rates?"""
    run = subject.run()
    planned = [float(group.get("initial_lr", group.get("lr", 0.0))) for group in run.optimizer.param_groups]
    if len({rate for rate in planned if rate > 0}) < 2:
        return subject.not_applicable("needs groups with different learning rates")
    updates = [rates for rates in _rates(subject, _STEPS, lambda run, batch: run.step(batch)) if all(rates)]
    if not updates or len(updates[0]) != len(planned):
        return subject.not_applicable(f"needs an update in {_STEPS} steps with rates above 0")
    # All rates are relative to those of the first group that trains.
    first, *others = [index for index, rate in enumerate(planned) if rate > 0]
    wanted = {index: planned[index] / planned[first] for index in others}
    ratios = [{index: rates[index] / rates[first] for index in others} for rates in updates]
    apart = {
        (number, index): abs(found[index] / wanted[index] - 1)
        for number, found in enumerate(ratios)
        for index in others
    }
    (number, index), value = max(apart.items(), key=lambda item: item[1])
    if value <= _RATIO_CHANGE:
        return subject.passed(value, _RATIO_CHANGE)
    own_schedules = "each group has its own schedule, or all groups have the same minimum"
    return subject.failed_unless(
        None if _is_collapsed(wanted, ratios) else own_schedules,
        value,
        _RATIO_CHANGE,
        where=f"update {number}: {_listed_rates(updates[number])}",
        meaning=f"The groups were created with the rates {_listed_rates(planned)}. The ratio of groups "
        f"{first} and {index} changes.",
        advice="Multiply the rate of each group by the factor of the schedule, instead of using the "
        "same rate for all groups.",
    )


def _is_collapsed(wanted: dict[int, float], ratios: list[dict[int, float]]) -> bool:
    """Return True if groups with different rates have equal rates after the first update.

    Groups that become equal later may have a common minimum.
    """
    differ = all(abs(ratio - 1) > _RATIO_CHANGE for ratio in wanted.values())
    later = [abs(ratio - 1) for found in ratios[1:] for ratio in found.values()]
    return differ and bool(later) and max(later) <= _ROUNDING


def _listed_rates(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.3g}" for rate in rates)


@trainer_check(suite="full")
def planned_steps(subject: TrainerSubject) -> CheckResult:
    """Does a full training make total_steps updates?"""
    total = subject.spec.total_steps
    run = subject.run()
    if total is None or not subject.has(run, "fit"):
        return subject.not_applicable("needs total_steps, and a run with fit()")
    made = len(_windows_of_fit(subject, run))
    if made != total:
        return subject.failed(
            made,
            total,
            where="the whole training",
            meaning=f"The run makes {made} updates instead of {total}.",
            advice="Count updates, not batches: accumulation, several processes and dropped last batches "
            "change the number of batches per update.",
        )
    return subject.passed(made, total)


@trainer_check(suite="full")
def equal_windows(subject: TrainerSubject) -> CheckResult:
    """Do all updates of a full training contain at most the usual number of backward passes?"""
    run = subject.run()
    if not subject.has(run, "fit"):
        return subject.not_applicable("needs a run with fit()")
    made = [each for each in _windows_of_fit(subject, run, _MOST_UPDATES) if each]
    if not made:
        return subject.not_applicable("needs updates with a gradient of the first parameter")
    usual = Counter(made).most_common(1)[0][0]
    if usual not in made[made.index(max(made)) :]:
        return subject.passed(meaning="The number of backward passes grows during the training.")
    largest, length = max(made), _length_of_epoch(subject)
    if largest == usual:
        return subject.passed(float(largest), float(usual))
    is_left_over = length is not None and length % usual > 0 and largest == usual + length % usual
    return subject.failed_unless(
        None if is_left_over else "updates contain different numbers of backward passes on purpose",
        float(largest),
        float(usual),
        where=f"update {made.index(largest)}",
        meaning=f"The update contains gradients of {largest} backward passes; most updates contain {usual}.",
        advice="Make an update from the last micro-batches of an epoch, or clear their gradients: the first "
        "update of the next epoch must not contain them.",
    )


def _windows_of_fit(subject: TrainerSubject, run: Any, most: int | None = None) -> list[int]:
    """Return the number of backward passes of the first parameter in each update of a training.

    The training ends after `most` updates.
    """
    counts = [0]

    def count(_: Any) -> None:
        counts[-1] += 1

    def end(_: Any) -> None:
        counts.append(0)
        if len(counts) - 1 == most:
            raise _EnoughError

    with ExitStack() as stack:
        for p in [p for p in run.model.parameters() if p.requires_grad][:1]:
            stack.callback(p.register_post_accumulate_grad_hook(count).remove)
        stack.enter_context(subject.fixed_randomness())
        stack.enter_context(suppress(_EnoughError))
        stack.enter_context(each_update(run.optimizer, lambda _: None, end))
        run.fit()
    return counts[:-1]


def _length_of_epoch(subject: TrainerSubject) -> int | None:
    """Return the number of batches of the first epoch. None: no data of the run, or over 1000 batches."""
    run: Any = subject.run()
    if not subject.has(run, "epoch"):
        return None
    with subject.fixed_randomness():
        length = len(list(islice(run.epoch(0), _LONGEST_EPOCH + 1)))
    return length if length <= _LONGEST_EPOCH else None


class _EnoughError(Exception):
    """Ends a training after enough updates."""


def _counts_of(run: TrainingRun) -> dict[str, tuple[int, int]]:
    """Return the number of calls and the epoch of each scheduler, or of the one that it wraps.

    Some schedulers of torch count their calls, which is exact. Others have an epoch only, which a call may
    set.
    """
    found = {}
    for name, scheduler in schedulers_of(run).items():
        for each in (scheduler, getattr(scheduler, "scheduler", None)):
            calls, place = getattr(each, "_step_count", None), getattr(each, "last_epoch", None)
            if isinstance(calls, int) or isinstance(place, int):
                found[name] = (
                    calls if isinstance(calls, int) else 0,
                    place if isinstance(place, int) else 0,
                )
                break
    return found


def _rates(subject: TrainerSubject, n: int, step: Callable[[TrainingRun, Any], Any]) -> list[list[float]]:
    """Return the learning rates of all groups in each update of `n` calls."""
    return [rates for _, rates in _numbered_rates(subject, n, step)]


def _numbered_rates(
    subject: TrainerSubject, n: int, step: Callable[[TrainingRun, Any], Any]
) -> list[tuple[int, list[float]]]:
    """Return the learning rates of all groups in each update of `n` calls, with the number of the call."""
    run = subject.run()
    rates: list[tuple[int, list[float]]] = []
    number = 0
    with (
        subject.fixed_randomness(),
        each_update(run.optimizer, lambda o: rates.append((number, rates_of(o)))),
    ):
        for number in range(n):
            step(run, subject.batch(number, **_SMALL))
    return rates

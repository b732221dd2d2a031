"""Schedule: each update has the learning rate that is declared for its number."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import islice
from typing import Any

import torch

from stackwise.checks.probe.applicable import needed, trainer_check
from stackwise.checks.probe.update import each_update, rates_of, train
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_adapter import schedulers_of
from stackwise.subject.trainer_spec import TrainingRun
from stackwise.support.hooks import temporary_hooks

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
    claim = needed(subject.spec.learning_rate, "learning_rate, the declared rate of each step")
    updates = _rates(subject, _STEPS)
    needed(updates, f"an update in {_STEPS} steps")
    rates = [rates for _, rates in updates]
    # A step without an update, such as one that a loss scale skips, may advance the schedule or not.
    counts = (range(len(updates)), [number for number, _ in updates])
    found = [_farthest(rates, [float(claim(number)) for number in numbers]) for numbers in counts]
    value, number, group, claimed = min(found)
    return subject.at_most(
        value,
        _ROUNDING,
        where=f"update {number}, group {group}: {rates[number][group]:.6g}, declared {claimed:.6g}",
        meaning=f"In {len(rates)} compared updates, a learning rate differs from the declared one. The "
        "measured difference is relative to the largest declared rate.",
        advice="Look for a counter of micro-batches or epochs instead of updates, at the order of "
        "scheduler.step() and optimizer.step(), and at the total number of steps of the schedule.",
    )


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
    needed(subject.has(subject.run(), "accumulate"), "accumulate(batches)")
    n = _STEPS // 2
    single, several = ([rates for _, rates in _rates(subject, n, m)] for m in (1, _MICRO_BATCHES))
    is_one = bool(single) and len(single) == len(several)
    needed(is_one, "one update in each step() and in each accumulate()")
    peak = max(max(each, default=0.0) for each in single) or 1.0
    differences = [
        max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0) / peak
        for one, other in zip(single, several, strict=True)
    ]
    value = max(differences)
    if value <= _ROUNDING:
        return subject.passed(value, _ROUNDING)
    number = differences.index(value)
    return subject.failed(
        value,
        _ROUNDING,
        where=f"update {number}",
        meaning=f"The learning rate is {several[number][0]:.6g} with {_MICRO_BATCHES} micro-batches per "
        f"update, and {single[number][0]:.6g} with one.",
        advice="Step the scheduler once for each update, inside the same condition as the optimizer.",
    )


@trainer_check
def scheduler_count(subject: TrainerSubject) -> CheckResult:
    """Is the scheduler stepped once per update?"""
    run = subject.run()
    is_undeclared = subject.spec.learning_rate is None
    needed(is_undeclared, "a run without a declared learning rate: learning_rate applies")
    start = before = needed(_counts_of(run), "a scheduler that counts its steps, as torch schedulers do")
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
    needed(steps > 0, f"a scheduler that is stepped in the first {_STEPS // 2} updates")
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
    planned = needed(rates_of(run.optimizer), "an update in the first step")
    seen = train(subject, run, 1)
    needed(seen.updates, "an update in the first step")
    rates = seen.updates[0].learning_rates
    value = max(abs(a - b) for a, b in zip(rates, planned, strict=False)) / (max(map(abs, planned)) or 1.0)
    of_torch = any(isinstance(s, torch.optim.lr_scheduler.LRScheduler) for s in schedulers_of(run).values())
    if of_torch and value > _ROUNDING:
        return subject.failed(
            value,
            _ROUNDING,
            where="update 0",
            meaning=f"The scheduler begins at {planned[0]:.6g}, but the first update used {rates[0]:.6g}.",
            advice="Call scheduler.step() after optimizer.step(), or the first learning rate is not used.",
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
    needed(len({rate for rate in planned if rate > 0}) > 1, "groups with different learning rates")
    updates = [rates for _, rates in _rates(subject, _STEPS) if all(rates)]
    is_complete = bool(updates) and len(updates[0]) == len(planned)
    needed(is_complete, f"an update in {_STEPS} steps with rates above 0")
    # All rates are relative to those of the first group that trains.
    first, *others = [index for index, rate in enumerate(planned) if rate > 0]
    wanted = {index: planned[index] / planned[first] for index in others}
    ratios = [{index: rates[index] / rates[first] for index in others} for rates in updates]
    value, number, index = max(
        (abs(found[index] / wanted[index] - 1), number, index)
        for number, found in enumerate(ratios)
        for index in others
    )
    if value <= _RATIO_CHANGE:
        return subject.passed(value, _RATIO_CHANGE)
    old, new = (", ".join(f"{rate:.3g}" for rate in rates) for rates in (planned, updates[number]))
    return subject.failed_unless(
        None
        if _is_collapsed(wanted, ratios)
        else "each group has its own schedule, or all groups have the same minimum",
        value,
        _RATIO_CHANGE,
        where=f"update {number}: {new}",
        meaning=f"The groups were created with the rates {old}. The ratio of groups {first} and {index} "
        "changes.",
        advice="Multiply the rate of each group by the factor of the schedule.",
    )


def _is_collapsed(wanted: dict[int, float], ratios: list[dict[int, float]]) -> bool:
    """Return True if groups with different rates have equal rates after the first update.

    Groups that become equal later may have a common minimum.
    """
    differ = all(abs(ratio - 1) > _RATIO_CHANGE for ratio in wanted.values())
    later = [abs(ratio - 1) for found in ratios[1:] for ratio in found.values()]
    return differ and bool(later) and max(later) <= _ROUNDING


@trainer_check(suite="full")
def planned_steps(subject: TrainerSubject) -> CheckResult:
    """Does a full training make total_steps updates?"""
    total = needed(subject.spec.total_steps, "total_steps, and a run with fit()")
    made = len(_windows_of_fit(subject))
    if made == total:
        return subject.passed(made, total)
    return subject.failed(
        made,
        total,
        where="the whole training",
        meaning=f"The run makes {made} updates instead of {total}.",
        advice="Count updates, not batches: accumulation, several processes and dropped last batches "
        "change the number of batches per update.",
    )


@trainer_check(suite="full")
def equal_windows(subject: TrainerSubject) -> CheckResult:
    """Do all updates of a full training contain at most the usual number of backward passes?"""
    made = [each for each in _windows_of_fit(subject, _MOST_UPDATES) if each]
    needed(made, "updates with a gradient of the first parameter")
    usual, largest = Counter(made).most_common(1)[0][0], max(made)
    if usual not in made[made.index(largest) :]:
        return subject.passed(meaning="The number of backward passes grows during the training.")
    if largest == usual:
        return subject.passed(float(largest), float(usual))
    left_over = _length_of_epoch(subject) % usual
    is_left_over = left_over > 0 and largest == usual + left_over
    return subject.failed_unless(
        None if is_left_over else "updates contain different numbers of backward passes on purpose",
        float(largest),
        float(usual),
        where=f"update {made.index(largest)}",
        meaning=f"The update contains gradients of {largest} backward passes; most updates contain {usual}.",
        advice="Make an update from the last micro-batches of an epoch, or clear their gradients: the first "
        "update of the next epoch must not contain them.",
    )


def _windows_of_fit(subject: TrainerSubject, most: int | None = None) -> list[int]:
    """Return the number of backward passes of the first parameter in each update of a training.

    The training ends after `most` updates.
    """
    run: Any = subject.run()
    needed(subject.has(run, "fit"), "a run with fit()")
    counts = [0]

    def count(_: Any) -> None:
        counts[-1] += 1

    def end(_: Any) -> None:
        counts.append(0)
        if len(counts) - 1 == most:
            raise _EnoughError

    first = [p for p in run.model.parameters() if p.requires_grad][:1]
    handles = [p.register_post_accumulate_grad_hook(count) for p in first]
    updates = each_update(run.optimizer, lambda _: None, end)
    with temporary_hooks(handles), subject.fixed_randomness(), suppress(_EnoughError), updates:
        run.fit()
    return counts[:-1]


def _length_of_epoch(subject: TrainerSubject) -> int:
    """Return the number of batches of the first epoch. 0: no data of the run, or over 1000 batches."""
    run: Any = subject.run()
    if not subject.has(run, "epoch"):
        return 0
    with subject.fixed_randomness():
        length = len(list(islice(run.epoch(0), _LONGEST_EPOCH + 1)))
    return length if length <= _LONGEST_EPOCH else 0


class _EnoughError(Exception):
    """Ends a training after enough updates."""


def _counts_of(run: TrainingRun) -> dict[str, tuple[int, int]]:
    """Return the number of calls and the epoch of each scheduler, or of the one that it wraps.

    Some schedulers of torch count their calls, which is exact. Others have an epoch only, which a call may
    set.
    """
    found: dict[str, tuple[int, int]] = {}
    for name, scheduler in schedulers_of(run).items():
        for each in (scheduler, getattr(scheduler, "scheduler", None)):
            counts = (getattr(each, "_step_count", None), getattr(each, "last_epoch", None))
            calls, place = (count if isinstance(count, int) else None for count in counts)
            if calls is not None or place is not None:
                found.setdefault(name, (calls or 0, place or 0))
    return found


def _rates(subject: TrainerSubject, n: int, n_micro_batches: int = 1) -> list[tuple[int, list[float]]]:
    """Return the learning rates of all groups in each update of `n` steps, with the number of the step."""
    run: Any = subject.run()
    rates: list[tuple[int, list[float]]] = []
    number = 0

    def record(optimizer: Any) -> None:
        rates.append((number, rates_of(optimizer)))

    with subject.fixed_randomness(), each_update(run.optimizer, record):
        for number in range(n):
            batch = subject.batch(number, **_SMALL)
            if n_micro_batches > 1:
                run.accumulate([batch] * n_micro_batches)
            else:
                run.step(batch)
    return rates

"""Average: a copy of the weights, such as an EMA or a target network, follows all weights equally."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stackwise.checks.probe.applicable import needed, trainer_check
from stackwise.checks.probe.run_state import different
from stackwise.checks.probe.update import observed, train, weights_of
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.runs.averages import Move, averages_of, followers
from stackwise.checks.trainer_subject import TrainerSubject

# Steps in which an average must change. Some averages are updated in every fifth or tenth step.
_STEPS = 12
# Largest relative difference of a change from the common fraction of the distance.
_LIMIT = 0.1
# Largest relative difference between a fraction and the one that two updates give.
_EXACT = 0.01
# Fraction above which an update copies the weights.
_COPY = 0.999
# Largest fraction of the elements that do not change because of rounding.
_MOST_STUCK = 0.5
_MICRO_BATCHES = 3
# Largest difference of the norm of a unit vector from 1.
_UNIT = 1e-3
# Largest relative difference of the fraction from the declared 1 - decay.
_DECAY_LIMIT = 0.02


@trainer_check
def average_share(subject: TrainerSubject) -> CheckResult:
    """Does an update of an average move all its tensors by the same fraction, and by the declared one?"""
    averages = _moves(subject)
    if not averages:
        return _unmoved(subject)
    averages = {path: updates for path, updates in averages.items() if _moves_towards_weights(updates)}
    needed(averages, "an average whose tensors move towards the weights")
    findings = (find(subject, updates) for updates in averages.values() for find in (_uneven, _stuck))
    if finding := next(filter(None, findings), None):
        return finding
    if difference := _more_in_accumulation(subject, averages):
        return subject.failed(
            difference[0] / difference[1] - 1,
            _LIMIT,
            where=f"accumulate() of {_MICRO_BATCHES} micro-batches",
            meaning=f"Several micro-batches move the average by {difference[0]:.4g} of its distance from the "
            f"weights. One batch moves the average by {difference[1]:.4g} of this distance.",
            advice="Update the average once for each optimizer step, and not for each micro-batch.",
        )
    if name := _averaged_vector(subject):
        return subject.failed(
            1.0,
            0.0,
            where=name,
            meaning="This buffer has norm 1 in the model, as in spectral normalization; in the average, not.",
            advice="Copy buffers to the average: the mean of unit vectors does not have norm 1.",
        )
    if subject.spec.average_decay is not None:
        results = [_declared(subject, subject.spec.average_decay, updates) for updates in averages.values()]
        return next((result for result in results if result.status == "passed"), results[0])
    shares = [update.after.share for updates in averages.values() for update in updates]
    return subject.passed(
        max(shares),
        meaning=f"Updates: {len(shares)}, with fractions from {min(shares):.4g} to {max(shares):.4g}.",
    )


@dataclass(frozen=True)
class _Update:
    """Update of one average in a step.

    Attributes:
        step: number of the step.
        after, middle, before: moves towards the weights after the step, directly after the update of the
            optimizer, and before the step.
    """

    step: int
    after: Move
    middle: Move
    before: Move

    @property
    def best(self) -> Move:
        """Return the move that explains most tensors. An average may be one step late on purpose."""
        moves = [each for each in (self.after, self.middle, self.before) if each.share]
        return min(moves, key=lambda each: len(_wrong(each.gaps())))


def _unmoved(subject: TrainerSubject) -> CheckResult:
    """Return a warning if a copy of the weights does not change during training, but the weights do."""
    run = subject.run()
    start = weights_of(run)
    before = {name: value for name, value in averages_of(run).items() if _is_copy(value, start)}
    needed(before, "a copy of the weights in an attribute of the run")
    train(subject, run, _STEPS)
    needed(different(start, weights_of(run)), f"a weight that {_STEPS} steps change")
    after = averages_of(run)
    still = [name for name, value in before.items() if name in after and torch.equal(value, after[name])]
    needed(len(still) == len(before), "an average with a tensor for each weight")
    return subject.warned(
        0.0,
        where=listed(still),
        meaning=f"A copy of the weights did not change in {_STEPS} steps, but the weights changed.",
        correct_if="the copy is a reference model, or is updated less often",
        advice="Look for a decay of 1, and for an update over parameters() of a copy that has no parameters.",
    )


def _moves_towards_weights(updates: list[_Update]) -> bool:
    """Return True if at least half of the tensors move towards their weights in each update."""
    pairs = ((update.best, update.best.shares) for update in updates)
    return all(len(_wrong(move.gaps(shares))) < len(move.tensors) / 2 for move, shares in pairs)


def _uneven(subject: TrainerSubject, updates: list[_Update]) -> CheckResult | None:
    """Return a finding if some tensors of an average move by a different fraction than the others."""
    if found := next(filter(None, (_uneven_in(subject, update) for update in updates)), None):
        return found
    moves = [update.best for update in updates]
    still = Counter(path for move in moves for path in _wrong(move.gaps()) if move.shares[path] == 0)
    never = [path for path, count in still.items() if count == len(updates)]
    if not never:
        return None
    return subject.failed(
        1.0,
        _LIMIT,
        where=listed(never),
        meaning="These tensors of the average never move, but the other tensors do.",
        advice="Look for parameters that were frozen when the average was created, and for a filter.",
    )


def _uneven_in(subject: TrainerSubject, update: _Update) -> CheckResult | None:
    """Return a finding if some tensors move by a different fraction in one update."""
    move = update.best
    gaps, shares = move.gaps(), move.shares
    wrong = _wrong(gaps)
    own = _wrong(move.gaps(shares))  # not parallel to the distance
    twice = 1 - (1 - move.share) ** 2
    tied = [path for path in wrong if abs(shares[path] - twice) < _EXACT * twice and twice < _COPY]
    if own or tied:
        return subject.failed(
            max(gaps[path] for path in own or tied),
            _LIMIT,
            where=f"{listed(own or tied)}, step {update.step}",
            meaning="These tensors of the average do not move towards their weights; the others do."
            if own
            else "These tensors of the average move as if they were updated twice in a step.",
            advice="Look for pairs in a different order, and for tied weights that are updated twice.",
        )
    if different := [path for path in wrong if shares[path] and shares[path] < _COPY]:
        return subject.warned(
            max(gaps[path] for path in different),
            _LIMIT,
            where=f"{listed(different)}, step {update.step}",
            meaning="These tensors of the average do not move by the same fraction of their distance "
            f"from the weights as the other tensors. The fraction of the others is {move.share:.4g}.",
            correct_if="these weights have a decay of their own",
            advice="Use one decay for all weights.",
        )
    return None


def _stuck(subject: TrainerSubject, updates: list[_Update]) -> CheckResult | None:
    """Return a failure if rounding keeps most elements of an average from changing."""
    stuck = updates[-1].after.stuck
    if stuck <= _MOST_STUCK:
        return None
    return subject.failed(
        stuck,
        _MOST_STUCK,
        where=f"step {updates[-1].step}",
        meaning=f"{stuck:.0%} of the elements that are far from their weights did not change: the change is "
        "below the rounding of the average.",
        advice="Keep the average in float32.",
    )


def _declared(subject: TrainerSubject, decay: Callable[[int], float], updates: list[_Update]) -> CheckResult:
    """Compare the fractions of the updates of one average with the declared decay."""
    worst, text = 0.0, ""
    for number, update in enumerate(updates):
        wanted = 1 - decay(number)
        gap = abs(update.after.share - wanted) / max(abs(wanted), 1e-12) - update.after.rounding
        if gap > worst:
            worst = gap
            text = f"step {update.step}: decay {1 - update.after.share:.6g}, declared {decay(number):.6g}"
    return subject.at_most(
        worst,
        _DECAY_LIMIT,
        where=text,
        meaning=f"The largest relative difference from the declared 1 - decay in {len(updates)} updates.",
        advice="Look for a warm-up of the decay, for its formula, and for an update in each micro-batch.",
    )


def _more_in_accumulation(
    subject: TrainerSubject, averages: dict[str, list[_Update]]
) -> tuple[float, float] | None:
    """Return the fraction of an update from several micro-batches, and from one, if the first is larger."""
    if not subject.has(subject.run(), "accumulate"):
        return None
    accumulated = _moves(subject, n_micro_batches=_MICRO_BATCHES)
    pairs = (
        (more.after.share, one.after.share)
        for path, updates in averages.items()
        for more, one in zip(accumulated.get(path, []), updates, strict=False)
    )
    return next(((more, one) for more, one in pairs if more > (1 + _LIMIT) * one), None)


def _averaged_vector(subject: TrainerSubject) -> str:
    """Return the path of a buffer whose norm is 1 in the model and different in an average, or ""."""
    run = subject.run()
    train(subject, run, _STEPS)
    averages = averages_of(run)
    units = [
        f".{name}"
        for name, buffer in run.model.named_buffers()
        if buffer.ndim == 1 and len(buffer) > 1 and _has_unit_norm(buffer)
    ]
    copies = (path for name in units for path in averages if path.endswith(name))
    return next((path for path in copies if not _has_unit_norm(averages[path])), "")


def _has_unit_norm(x: Tensor) -> bool:
    return x.is_floating_point() and abs(float(x.double().norm()) - 1) < _UNIT


def _moves(subject: TrainerSubject, n_micro_batches: int = 0) -> dict[str, list[_Update]]:
    """Return the updates of each average, by its path.

    If `n_micro_batches` is above 0, each update is from this number of micro-batches.
    """
    run: Any = subject.run()
    start, copies = weights_of(run), averages_of(run)
    averages = {
        path: paths
        for path, paths in followers(run).items()
        if len(paths) > 1 and any(_is_copy(copies[each], start) for each in paths.values())
    }
    updates: dict[str, list[_Update]] = {}
    with subject.fixed_randomness():
        for step in range(_STEPS if averages else 0):
            weights, before = weights_of(run), averages_of(run)
            with observed(run) as seen:
                if n_micro_batches:
                    numbers = range(step * n_micro_batches, (step + 1) * n_micro_batches)
                    run.accumulate([subject.batch(number) for number in numbers])
                else:
                    run.step(subject.batch(step))
            after, end = averages_of(run), weights_of(run)
            middle = seen.updates[-1].after if seen.updates else end
            for path, paths in averages.items():
                moves = [Move.between(before, after, each, paths) for each in (end, middle, weights)]
                if len(moves[0].tensors) > 1 and moves[0].share:
                    updates.setdefault(path, []).append(_Update(step, *moves))
    return updates


def _wrong(gaps: dict[str, float]) -> list[str]:
    return [path for path, gap in gaps.items() if gap > _LIMIT]


def _is_copy(value: Tensor, weights: dict[str, Tensor]) -> bool:
    """Return True if a tensor is equal to a weight. A norm of ones or a bias of zeros does not show this."""
    if value.numel() == 0 or torch.equal(value, value.flatten()[0].expand(value.shape)):
        return False
    return any(value.shape == p.shape and torch.equal(value, p.to(value.dtype)) for p in weights.values())

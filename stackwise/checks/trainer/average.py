"""Average: a copy of the weights, such as an EMA or a target network, follows all weights equally."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stackwise.checks.check import trainer_check
from stackwise.checks.result import CheckResult, listed
from stackwise.checks.runs.averages import Move, averages_of, followers
from stackwise.checks.trainer_subject import TrainerSubject
from stackwise.subject.trainer_spec import TrainingRun

# Steps in which an average changes. Some are updated in each fifth or tenth step.
_STEPS = 12
# Largest difference of a change from the common share of the distance, relative to it.
_LIMIT = 0.1
# The same for the choice between the weights after and before an update of the optimizer.
_EXACT = 0.01
# Share of elements that rounding may keep from changing.
_MOST_STUCK = 0.5
# Largest difference of the share from the declared one, relative to it.
_DECAY_LIMIT = 0.02
_NEEDS = "needs a copy of the weights in an attribute of the run"


@trainer_check
def average_follows(subject: TrainerSubject) -> CheckResult:
    """Does an average of the weights, or a target network, change during training?"""
    run = subject.run()
    start = _weights_of(run)
    before = {name: value for name, value in averages_of(run).items() if _is_copy(value, start)}
    if not before:
        return subject.not_applicable(_NEEDS)
    with subject.fixed_randomness():
        for number in range(_STEPS):
            run.step(subject.batch(number))
    if all(torch.equal(p, start[name]) for name, p in run.model.named_parameters()):
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


@trainer_check
def average_share(subject: TrainerSubject) -> CheckResult:
    """Does an update of an average move all its tensors by the same share, and by the declared one?"""
    moves = _moves(subject)
    if not moves:
        return subject.not_applicable(f"{_NEEDS} that changes")
    late = []
    for step, *choices in moves:
        gaps = [each.gaps() for each in choices if each.share]
        if len(gaps) == len(choices):
            late.append(max(gaps[0].values()) > _EXACT >= max(gaps[1].values()))
        best = min(gaps, key=lambda each: len(_wrong(each)))
        if wrong := _wrong(best):
            if len(wrong) >= len(best) / 2:
                return subject.not_applicable("needs an average whose tensors move towards the weights")
            return subject.failed(
                max(best[path] for path in wrong),
                _LIMIT,
                where=f"{listed(wrong)}, step {step}",
                meaning=f"The other {len(best) - len(wrong)} tensors move by one share of their distance.",
                advice="Look for pairs of tensors in another order, for parameters that were frozen when the "
                "pairs were made, and for tied weights that are updated twice.",
            )
    stuck = moves[-1][1].stuck
    if stuck > _MOST_STUCK:
        return subject.failed(
            stuck,
            _MOST_STUCK,
            where=f"step {moves[-1][0]}",
            meaning=f"{stuck:.0%} of the elements that are far from their weights did not change: the change "
            "is below the rounding of the average.",
            advice="Keep the average in float32.",
        )
    if late and all(late):
        return subject.warned(
            1.0,
            0.0,
            where="all averages",
            meaning="The average follows the weights from before the update of the optimizer.",
            correct_if="the average is meant to be one step late",
            advice="Update the average after optimizer.step().",
        )
    if subject.spec.average_decay is not None:
        return _declared(subject, subject.spec.average_decay, [(step, move) for step, move, _ in moves])
    shares = [move.share for _, move, _ in moves]
    return subject.passed(
        max(shares), meaning=f"{len(moves)} updates with shares of {min(shares):.4g} to {max(shares):.4g}."
    )


def _declared(
    subject: TrainerSubject, decay: Callable[[int], float], moves: list[tuple[int, Move]]
) -> CheckResult:
    """Compare the shares of the updates with the declared decay."""
    worst, text = 0.0, ""
    for number, (step, move) in enumerate(moves):
        wanted = 1 - decay(number)
        gap = abs(move.share - wanted) / max(abs(wanted), 1e-12) - move.rounding
        if gap > worst:
            worst = gap
            text = f"step {step}: a decay of {1 - move.share:.6g}; declared is {decay(number):.6g}"
    return subject.at_most(
        worst,
        _DECAY_LIMIT,
        where=text,
        meaning=f"The largest difference of the share of the weights, in {len(moves)} updates.",
        advice="Look for a warm-up of the decay, for its exponent, and for an update in each micro-batch.",
    )


def _moves(subject: TrainerSubject) -> list[tuple[int, Move, Move]]:
    """Return the updates of averages: step, and moves towards the weights after it and before it."""
    run = subject.run()
    start, copies = _weights_of(run), averages_of(run)
    averages = [
        paths
        for paths in followers(run).values()
        if len(paths) > 1 and any(_is_copy(copies[path], start) for path in paths.values())
    ]
    moves = []
    with subject.fixed_randomness():
        for step in range(_STEPS if averages else 0):
            weights, before = _weights_of(run), averages_of(run)
            run.step(subject.batch(step))
            after, new_weights = averages_of(run), _weights_of(run)
            for paths in averages:
                move, earlier = (Move.between(before, after, w, paths) for w in (new_weights, weights))
                if len(move.tensors) > 1 and move.share:
                    moves.append((step, move, earlier))
    return moves


def _wrong(gaps: dict[str, float]) -> list[str]:
    return [path for path, gap in gaps.items() if gap > _LIMIT]


def _weights_of(run: TrainingRun) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def _is_copy(value: Tensor, weights: dict[str, Tensor]) -> bool:
    """Return True if a tensor is equal to a weight. A norm of ones or a bias of zeros does not show this."""
    if value.numel() == 0 or torch.equal(value, value.flatten()[0].expand(value.shape)):
        return False
    return any(value.shape == p.shape and torch.equal(value, p.to(value.dtype)) for p in weights.values())

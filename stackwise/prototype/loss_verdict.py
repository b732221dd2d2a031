"""LossVerdict: what a series of losses says of a training: sound, spiky, diverged, or no number."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stackwise.prototype.prototype_run import Status
from stackwise.support.arguments import check_number, check_sizes

__all__ = ["DivergenceRule", "LossVerdict", "SpikeRule", "in_place_of_a_nat", "loss_verdict"]

_SIGMA = 1.4826  # standard deviations of a normal distribution in one MAD


@dataclass(frozen=True)
class SpikeRule:
    """When a loss is a spike: far above the losses before it, in their own spread and in nats.

    A spike begins where the loss is above the median of the `window` losses before it by more than
    `n_mads` times their median absolute deviation (scaled to a standard deviation, times 1.4826) and by more
    than `min_nats`. It lasts until a loss is no longer that far above the same median; what is inside a spike
    is no part of any window. Both conditions are needed: late in a training the spread may be next to
    nothing, and of a few rows of a mixed text it is a nat.

    Attributes:
        n_mads: how many scaled MADs.
        min_nats: and how many nats.
        window: of how many losses.
        history: with fewer losses before it, nothing is a spike.

    Raises:
        ValueError: a number that is not positive.
    """

    n_mads: float = 8.0
    min_nats: float = 0.5
    window: int = 50
    history: int = 8

    def __post_init__(self) -> None:
        check_sizes(window=self.window, history=self.history)
        for key in ("n_mads", "min_nats"):
            check_number(key, getattr(self, key), "a finite number > 0", lambda value: value > 0)

    def spikes(self, losses: Sequence[float]) -> list[range]:
        """The steps of each spike, in order. One that begins is not over before the loss has come back."""
        found: list[range] = []
        sound: list[float] = []
        start: int | None = None
        level = math.inf
        for step, loss in enumerate(losses):
            if start is None:
                level = self._level(sound)
            high = not loss <= level  # also what is no number
            if high and start is None:
                start = step
            elif not high and start is not None:
                found.append(range(start, step))
                start = None
            if not high:
                sound.append(loss)
        if start is not None:
            found.append(range(start, len(losses)))
        return found

    def _level(self, sound: Sequence[float]) -> float:
        if len(sound) < self.history:
            return math.inf
        recent = sound[-self.window :]
        median = statistics.median(recent)
        mad = statistics.median(abs(loss - median) for loss in recent)
        return median + max(self.n_mads * _SIGMA * mad, self.min_nats)


@dataclass(frozen=True)
class DivergenceRule:
    """When a training has diverged: its loss has risen, and stays up to the end.

    The loss is smoothed by a running median over the last `window` steps, or a tenth of the run where that is
    fewer (three at least). It has diverged where it ends more than `rise_nats` above the first loss and the
    median of the first three, or more than `lost_nats` above the lowest that it had been; in both cases by
    more than `n_mads` standard deviations of the noise as well. These are taken of the changes from step to
    step, as their scaled MAD over sqrt(2): a running median of few losses follows their noise. The step at
    which it left is the first of those from which on the smoothed loss never comes below that level again,
    or of the unsmoothed ones above it right before. Where that is among the first three or right behind
    them, their median has risen as well, and what was left is the level of the first.

    Attributes:
        rise_nats: above the first loss, and above the median of the first three.
        lost_nats: above the lowest smoothed loss.
        n_mads: of the noise of the losses.
        window: of the running median, at most.
        history: of fewer losses nothing has diverged.

    Raises:
        ValueError: a number that is not positive.
    """

    rise_nats: float = 0.25
    lost_nats: float = 0.5
    n_mads: float = 4.0
    window: int = 50
    history: int = 8

    def __post_init__(self) -> None:
        check_sizes(window=self.window)
        check_sizes(3, history=self.history)
        for key in ("rise_nats", "lost_nats", "n_mads"):
            check_number(key, getattr(self, key), "a finite number > 0", lambda value: value > 0)

    def step(self, losses: Sequence[float]) -> int | None:
        """The step at which finite `losses` left for good; None: they did not."""
        if len(losses) < self.history:
            return None
        window = max(3, min(self.window, len(losses) // 10))
        smoothed = [statistics.median(losses[max(0, i + 1 - window) : i + 1]) for i in range(len(losses))]
        changes = [after - before for before, after in itertools.pairwise(losses)]
        center = statistics.median(changes)
        noise = statistics.median(abs(change - center) for change in changes) / math.sqrt(2)
        least = self.n_mads * _SIGMA * noise
        # A median of few is not yet one: the best is looked for where the window is full.
        above_best = min(smoothed[window - 1 :]) + max(self.lost_nats, least)
        rise = max(self.rise_nats, least)
        begin = max(losses[0], statistics.median(losses[:3]))  # a first loss may be low by chance
        if not smoothed[-1] > min(begin + rise, above_best):
            return None
        step = _left(losses, smoothed, min(begin + rise, above_best))
        # Of a loss that rises at once the median of the first three has risen as well.
        return step if step > 3 else _left(losses, smoothed, min(losses[0] + rise, above_best))


def _left(losses: Sequence[float], smoothed: Sequence[float], level: float) -> int:
    """The first step from which on the smoothed losses are above a level, or the others right before."""
    step = len(losses)
    while step > 0 and smoothed[step - 1] > level:
        step -= 1
    while step > 0 and losses[step - 1] > level:
        step -= 1
    return step


@dataclass(frozen=True)
class LossVerdict:
    """The verdict on a run.

    Attributes:
        status: "nan" before "diverged" before "spiky" before "success".
        step: of the first trouble; None: a success.
        spikes: the steps at which spikes began, whatever the status.
    """

    status: Status
    step: int | None
    spikes: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def loss_verdict(
    losses: Sequence[float],
    gradient_norms: Sequence[float] = (),
    *,
    spike: SpikeRule | None = None,
    divergence: DivergenceRule | None = None,
    in_nats: bool = True,
) -> LossVerdict:
    """What the losses of a run, and its gradient norms, say of it.

    - "nan": a loss or a gradient norm is not finite; the step of the first.
    - "diverged": see `DivergenceRule`.
    - "spiky": see `SpikeRule`; the step of the first spike. One that the run ends in counts as well.
    - "success": none of these.

    Args:
        losses: one for each step.
        gradient_norms: as many, or none.
        spike: None: `SpikeRule()`.
        divergence: None: `DivergenceRule()`.
        in_nats: whether the losses are in nats; where not, a rule that is None has for each nat the median of
            the first three losses where that is less than 1: a loss that begins low has low limits.
    """
    broken = min(
        (i for series in (losses, gradient_norms) for i, x in enumerate(series) if not math.isfinite(x)),
        default=None,
    )
    sound = losses[:broken]
    nat = 1.0 if in_nats else in_place_of_a_nat(losses)
    if spike is None:
        spike = SpikeRule()
        spike = replace(spike, min_nats=spike.min_nats * nat)
    if divergence is None:
        divergence = DivergenceRule()
        divergence = replace(
            divergence, rise_nats=divergence.rise_nats * nat, lost_nats=divergence.lost_nats * nat
        )
    spikes = tuple(each.start for each in spike.spikes(sound))
    if broken is not None:
        return LossVerdict("nan", broken, spikes)
    left = divergence.step(losses)
    if left is not None:
        return LossVerdict("diverged", left, spikes)
    return LossVerdict("spiky", spikes[0], spikes) if spikes else LossVerdict("success", None)


def in_place_of_a_nat(losses: Sequence[float]) -> float:
    """What the limits of `loss_verdict` have for each nat where losses need not be in nats: at most 1."""
    first = [*itertools.takewhile(math.isfinite, losses[:3])]
    found = abs(statistics.median(first)) if first else 0.0
    return min(found, 1.0) if found >= sys.float_info.min else 1.0

"""LossVerdict: verdict on a series of training losses: success, spiky, diverged, or not finite."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stackwise.prototype.prototype_run import Status
from stackwise.support.arguments import check_number, check_sizes

__all__ = ["DivergenceRule", "LossVerdict", "SpikeRule", "in_place_of_a_nat", "loss_verdict"]

_SIGMA = 1.4826  # standard deviations of a normal distribution per MAD


@dataclass(frozen=True)
class SpikeRule:
    """Rule for loss spikes: losses far above the previous ones, relative to their spread and in nats.

    A spike starts if the loss exceeds the median of the `window` previous losses by more than `n_mads` times
    their median absolute deviation (multiplied by 1.4826 to estimate a standard deviation), and by more than
    `min_nats`. It lasts until a loss no longer exceeds the same median by that amount. Losses within a spike
    are excluded from later windows. Both conditions are required: late in training, the spread may be almost
    zero, and for a few rows of a mixed text it is a nat.

    Attributes:
        n_mads: minimum height in scaled MADs.
        min_nats: minimum height in nats.
        window: number of previous losses.
        history: minimum number of previous losses before a spike can be detected.

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
        """Return the steps of each spike in order.

        A spike lasts until the loss is normal, or to the last step.
        """
        found: list[range] = []
        sound: list[float] = []
        start: int | None = None
        level = math.inf
        for step, loss in enumerate(losses):
            if start is None:
                level = self._level(sound)
            high = not loss <= level  # also true for NaN
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
    """Rule for divergence: the loss has risen and stays high until the last step.

    The loss is smoothed by a running median over the last `window` steps, or over a tenth of the run if that
    is less (three steps or more). The run has diverged if the last smoothed loss exceeds the first loss and
    the median of the first three by more than `rise_nats`, or its own minimum by more than `lost_nats`. In
    both cases, it must also exceed them by more than `n_mads` standard deviations of the noise. The noise is
    the scaled MAD of the changes between consecutive steps, divided by sqrt(2), because a running median of
    few losses follows their noise.

    The step of divergence is the first one after which the smoothed loss stays above that level. If the
    unsmoothed losses directly before it are also above the level, it is the first of these. If it is among
    the first four steps, the median of the first three has risen too, so the level is computed from the first
    loss.

    Attributes:
        rise_nats: minimum rise above the first loss and the median of the first three.
        lost_nats: minimum rise above the lowest smoothed loss.
        n_mads: minimum rise in scaled MADs of the noise.
        window: maximum length of the running median.
        history: minimum number of losses. Shorter runs never diverge.

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
        """Return the step from which finite `losses` stay too high. None: no divergence."""
        if len(losses) < self.history:
            return None
        window = max(3, min(self.window, len(losses) // 10))
        smoothed = [statistics.median(losses[max(0, i + 1 - window) : i + 1]) for i in range(len(losses))]
        changes = [after - before for before, after in itertools.pairwise(losses)]
        center = statistics.median(changes)
        noise = statistics.median(abs(change - center) for change in changes) / math.sqrt(2)
        least = self.n_mads * _SIGMA * noise
        # Ignore partial windows when searching for the minimum.
        above_best = min(smoothed[window - 1 :]) + max(self.lost_nats, least)
        rise = max(self.rise_nats, least)
        begin = max(losses[0], statistics.median(losses[:3]))  # the first loss may be low by chance
        if not smoothed[-1] > min(begin + rise, above_best):
            return None
        step = _left(losses, smoothed, min(begin + rise, above_best))
        # If the loss rises immediately, the median of the first three has risen too.
        return step if step > 3 else _left(losses, smoothed, min(losses[0] + rise, above_best))


def _left(losses: Sequence[float], smoothed: Sequence[float], level: float) -> int:
    """Return the first step after which smoothed losses stay above a level, or losses directly before it."""
    step = len(losses)
    while step > 0 and smoothed[step - 1] > level:
        step -= 1
    while step > 0 and losses[step - 1] > level:
        step -= 1
    return step


@dataclass(frozen=True)
class LossVerdict:
    """Verdict on a run.

    Attributes:
        status: "nan", "diverged", "spiky" or "success". The first applicable one in this order.
        step: step of the first problem. None: success.
        spikes: steps at which spikes start, for any status.
    """

    status: Status
    step: int | None
    spikes: tuple[int, ...] = ()


def loss_verdict(
    losses: Sequence[float],
    gradient_norms: Sequence[float] = (),
    *,
    spike: SpikeRule | None = None,
    divergence: DivergenceRule | None = None,
    in_nats: bool = True,
) -> LossVerdict:
    """Return the verdict on the losses and gradient norms of a run.

    - "nan": a loss or a gradient norm is not finite. The step is the first such step.
    - "diverged": see `DivergenceRule`.
    - "spiky": see `SpikeRule`. The step is that of the first spike. A spike at the last step counts too.
    - "success": none of these.

    Args:
        losses: one loss per step.
        gradient_norms: one gradient norm per step, or empty.
        spike: rule for spikes. None: `SpikeRule()`.
        divergence: rule for divergence. None: `DivergenceRule()`.
        in_nats: True if the losses are in nats. False: in a default rule, one nat is replaced by the median
            of the first three losses, if that is less than 1. A loss with a low initial value therefore has
            low limits.
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
    """Return the unit of the limits of `loss_verdict` for losses that may not be in nats: at most 1."""
    first = [*itertools.takewhile(math.isfinite, losses[:3])]
    found = abs(statistics.median(first)) if first else 0.0
    return min(found, 1.0) if found >= sys.float_info.min else 1.0

"""Paired difference: how much better one model is than another on the same examples, as far as it is known.

What both get right, or both wrong, says nothing of a difference, so that the interval is of those where they
part: far narrower than what the intervals of two shares leave open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.special import bdtr, ndtri, stdtrit

from stackwise.support.arguments import check_number, require

__all__ = ["PairedDifference", "Standing", "difference_of_means", "difference_of_shares"]

Standing = Literal["not worse", "worse", "open"]
_STEPS = 100  # of a bisection


@dataclass(frozen=True)
class PairedDifference:
    """A figure of one model less that of another, from the same examples.

    Attributes:
        difference: the estimate.
        low: lower end of its interval.
        high: upper end.
        level: that the interval covers.
        examples: of which it is.
        wins: examples at which the first model is better.
        losses: and at which it is worse.
        p_value: two-sided, of "there is no difference"; None: not computed.
    """

    difference: float
    low: float
    high: float
    level: float
    examples: int
    wins: int
    losses: int
    p_value: float | None = None

    def standing(self, within: float, *, less_is_better: bool = False) -> Standing:
        """Whether the first model is worse by more than `within`.

        "worse" and "not worse" are sure, as far as the interval is; "open" needs more examples.
        """
        check_number("within", within, "a number >= 0", lambda value: value >= 0)
        low, high = (-self.high, -self.low) if less_is_better else (self.low, self.high)
        if high < -within:
            return "worse"
        return "not worse" if low >= -within else "open"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; ends that are not finite as text."""
        return {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in vars(self).items()
        }

    def __str__(self) -> str:
        return f"{self.difference:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def difference_of_shares(
    first: Sequence[bool] | np.ndarray, second: Sequence[bool] | np.ndarray, *, level: float = 0.95
) -> PairedDifference:
    """The share that the first gets right less that of the second.

    The interval is Tango's (Statistics in Medicine 17, 1998, 891-908), which inverts the score test and holds
    its level with few examples, also where the two never part; `p_value` is McNemar's, exact.

    Args:
        first: of each example, whether the first model is right.
        second: the same of the second, of the same examples.
        level: that the interval covers.

    Raises:
        ValueError: no examples, different numbers of them, or a level that is none.
    """
    one, two = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    _check(one, two, level)
    n, wins, losses = len(one), int((one & ~two).sum()), int((two & ~one).sum())
    limit = float(ndtri((1 + level) / 2))
    low = _root(n, wins, losses, limit)
    high = -_root(n, losses, wins, limit)
    parted = wins + losses
    p_value = min(1.0, 2 * float(bdtr(min(wins, losses), parted, 0.5))) if parted else 1.0
    return PairedDifference((wins - losses) / n, low, high, level, n, wins, losses, p_value)


def difference_of_means(
    first: Sequence[float] | np.ndarray,
    second: Sequence[float] | np.ndarray,
    weights: Sequence[float] | np.ndarray | None = None,
    *,
    level: float = 0.95,
    less_is_better: bool = False,
) -> PairedDifference:
    """The mean of the first less that of the second, such as bits per byte, each example with its weight.

    The interval is Student's, with n - 1 degrees of freedom: few examples make it wide, and a single one says
    nothing of how others would differ, so that its interval is without ends. A weighted mean is a ratio of
    two means, whose error is that of its linear part.

    Args:
        first: of each example, the figure of the first model.
        second: the same of the second.
        weights: of each example, such as its bytes; None: all the same.
        level: that the interval covers.
        less_is_better: whether the figure is a cost, so that the first wins where it is the lower one.

    Raises:
        ValueError: no examples, different numbers of them, or a level that is none; a weight that is not
            above 0.
    """
    one, two = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    _check(one, two, level)
    heavy = np.ones(len(one)) if weights is None else np.asarray(weights, dtype=np.float64)
    require(len(heavy) == len(one), "weights", len(heavy), f"as many as examples: {len(one)}")
    require(bool((heavy > 0).all()), "weights", float(heavy.min()), "numbers above 0")
    n = len(one)
    # A model that is infinitely surprised has no error that could be told: its interval is not a number.
    with np.errstate(invalid="ignore"):
        parts = one - two
        mean = float((parts * heavy).sum() / heavy.sum())
        spread = float(((heavy * (parts - mean)) ** 2).sum())
    lower, higher = int((parts < 0).sum()), int((parts > 0).sum())
    wins, losses = (lower, higher) if less_is_better else (higher, lower)
    if n == 1:
        return PairedDifference(mean, -math.inf, math.inf, level, n, wins, losses)
    error = math.sqrt(n / (n - 1) * spread) / float(heavy.sum())
    reach = float(stdtrit(n - 1, (1 + level) / 2)) * error
    return PairedDifference(mean, mean - reach, mean + reach, level, n, wins, losses)


def _check(one: np.ndarray, two: np.ndarray, level: float) -> None:
    require(one.ndim == two.ndim == 1 and len(one) > 0, "examples", len(one), "one or more")
    require(len(one) == len(two), "examples of the second", len(two), f"those of the first: {len(one)}")
    check_number("level", level, "a number above 0 and below 1", lambda value: 0 < value < 1)


def _root(n: int, wins: int, losses: int, limit: float) -> float:
    """The least difference that the score test does not refuse, by bisection."""
    below, above = -1.0, (wins - losses) / n
    for _ in range(_STEPS):
        middle = (below + above) / 2
        if _score(n, wins, losses, middle) > limit:
            below = middle
        else:
            above = middle
    return (below + above) / 2


def _score(n: int, wins: int, losses: int, difference: float) -> float:
    """How many standard errors the estimate is above a difference, if that were the true one."""
    a = 2 * n
    b = -wins - losses + (2 * n - wins + losses) * difference
    c = -losses * difference * (1 - difference)
    lost = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)  # the likeliest share of losses
    variance = n * (2 * lost + difference * (1 - difference))
    gap = wins - losses - n * difference
    if variance <= 0:
        return math.copysign(math.inf, gap) if gap else 0.0
    return gap / math.sqrt(variance)

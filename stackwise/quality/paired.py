"""Paired difference: difference between two models on the same examples, with its confidence interval.

Examples on which both models are right, or both are wrong, contain no information about the difference. The
paired interval is therefore much narrower than the intervals of two separate shares.
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
_STEPS = 100  # steps of a bisection


@dataclass(frozen=True)
class PairedDifference:
    """Value of one model minus the value of another one, on the same examples.

    Attributes:
        difference: estimate of the difference.
        low: lower end of the interval.
        high: upper end of the interval.
        level: confidence level of the interval.
        examples: number of examples.
        wins: number of examples on which the first model is better.
        losses: number of examples on which the first model is worse.
        p_value: two-sided p-value of the hypothesis of no difference. None: not computed.
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
        """Return "worse" if the first model is significantly worse by more than `within`.

        "not worse" means that it is significantly not. "open" means that more examples are needed.
        """
        check_number("within", within, "a number >= 0", lambda value: value >= 0)
        low, high = (-self.high, -self.low) if less_is_better else (self.low, self.high)
        if high < -within:
            return "worse"
        return "not worse" if low >= -within else "open"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON. Non-finite ends are strings."""
        return {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in vars(self).items()
        }

    def __str__(self) -> str:
        return f"{self.difference:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def difference_of_shares(
    first: Sequence[bool] | np.ndarray, second: Sequence[bool] | np.ndarray, *, level: float = 0.95
) -> PairedDifference:
    """Return the share of correct answers of the first model minus that of the second one.

    The interval is that of Tango (Statistics in Medicine 17, 1998, 891-908). It inverts the score test, and
    has the stated level with few examples and if the two models never differ. `p_value` is that of McNemar's
    exact test.

    Args:
        first: for each example, True if the first model is correct.
        second: the same for the second model, on the same examples.
        level: confidence level of the interval.

    Raises:
        ValueError: no examples, different numbers of examples, or an invalid level.
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
    """Return the weighted mean of the first model minus that of the second one, for example in bits per byte.

    The interval is Student's, with n - 1 degrees of freedom. It is wide for few examples, and unbounded for a
    single one, because this contains no information about the variation. A weighted mean is a ratio of two
    means. Its error is computed from the linear approximation.

    Args:
        first: value of the first model for each example.
        second: value of the second model for each example.
        weights: weight of each example, such as its number of bytes. None: equal weights.
        level: confidence level of the interval.
        less_is_better: True if the value is a cost, so that the first model wins if its value is lower.

    Raises:
        ValueError: no examples, different numbers of examples, an invalid level, or a weight that is not
            positive.
    """
    one, two = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    _check(one, two, level)
    heavy = np.ones(len(one)) if weights is None else np.asarray(weights, dtype=np.float64)
    require(len(heavy) == len(one), "weights", len(heavy), f"as many as examples: {len(one)}")
    require(bool((heavy > 0).all()), "weights", float(heavy.min()), "numbers above 0")
    n = len(one)
    # If a loss is infinite, the error is undefined, and the ends of the interval are NaN.
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
    """Return the smallest difference that the score test does not reject, by bisection."""
    below, above = -1.0, (wins - losses) / n
    for _ in range(_STEPS):
        middle = (below + above) / 2
        if _score(n, wins, losses, middle) > limit:
            below = middle
        else:
            above = middle
    return (below + above) / 2


def _score(n: int, wins: int, losses: int, difference: float) -> float:
    """Return the number of standard errors between the estimate and an assumed true difference."""
    a = 2 * n
    b = -wins - losses + (2 * n - wins + losses) * difference
    c = -losses * difference * (1 - difference)
    lost = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)  # maximum-likelihood share of losses
    variance = n * (2 * lost + difference * (1 - difference))
    gap = wins - losses - n * difference
    if variance <= 0:
        return math.copysign(math.inf, gap) if gap else 0.0
    return gap / math.sqrt(variance)

"""Hodges-Lehmann: centre of symmetric differences with any tails, and its confidence interval.

The estimate is the median of the means of all pairs of differences, including each difference with itself
(Hodges & Lehmann, Annals of Mathematical Statistics 34, 1963). A single outlier hardly moves it. Its interval
inverts Wilcoxon's signed-rank test, so it is valid for every symmetric distribution, if the number of rounds
suffices (Hollander, Wolfe & Chicken, Nonparametric Statistical Methods, 2014, section 3.3). The rule does not
use it for decisions: see `sequential`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from stackwise.support.arguments import check_number

__all__ = ["HodgesLehmann", "hodges_lehmann"]

# Largest number of differences with the exact distribution of the signed-rank statistic. For more differences
# the normal distribution is accurate to three digits.
_EXACT = 200


@dataclass(frozen=True)
class HodgesLehmann:
    """Centre of differences, with its confidence interval.

    Attributes:
        estimate: centre, in the unit of the differences.
        low: lower end of the interval; -inf if the differences are too few.
        high: upper end of the interval; inf if the differences are too few.
        level: confidence level of the interval, at least the requested level, since ranks are integers; 1 for
            an infinite interval.
    """

    estimate: float
    low: float
    high: float
    level: float


def hodges_lehmann(differences: Sequence[float], level: float = 0.95) -> HodgesLehmann:
    """Return the centre of `differences`, with an interval that only assumes symmetry about the centre.

    An interval at 95 % needs 6 differences, at 99 % 8.

    Args:
        differences: independent values, in any order.
        level: requested confidence level.

    Raises:
        ValueError: no differences, a difference that is not finite, or a level that is not between 0 and 1.
    """
    check_number("level", level, "a number between 0 and 1", lambda value: 0 < value < 1)
    values = np.asarray(differences, dtype=np.float64)
    if not (values.size and np.isfinite(values).all()):
        raise ValueError(f"differences: got {list(differences)!r}; allowed: one or more finite numbers")
    rows, columns = np.triu_indices(values.size)
    walsh = np.sort((values[rows] + values[columns]) / 2)
    cut, reached = _cut(values.size, (1 - level) / 2)
    if cut == 0:
        return HodgesLehmann(float(np.median(walsh)), -math.inf, math.inf, 1.0)
    return HodgesLehmann(float(np.median(walsh)), float(walsh[cut - 1]), float(walsh[-cut]), reached)


def _cut(count: int, risk: float) -> tuple[int, float]:
    """Return the rank of the interval's ends, counted from either end, and its level; 0: too few differences.

    The centre is below the mean of rank r if at most r - 1 of the means of pairs are below the centre. The
    number of these means is Wilcoxon's statistic.
    """
    if count > _EXACT:
        mean = count * (count + 1) / 4
        deviation = math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
        return math.floor(mean + float(ndtri(risk)) * deviation), 1 - 2 * risk
    at_most = _signed_rank(count)
    cut = int(np.searchsorted(at_most, risk * (1 + 1e-12), side="right"))
    return cut, 1.0 if cut == 0 else 1 - 2 * float(at_most[cut - 1])


@lru_cache(maxsize=_EXACT)
def _signed_rank(count: int) -> NDArray[np.float64]:
    """Return the cumulative distribution of the signed-rank statistic of `count` differences, from 0 on."""
    chances = np.array([1.0])
    for rank in range(1, count + 1):
        longer = np.zeros(chances.size + rank)
        longer[: chances.size] += chances / 2
        longer[rank:] += chances / 2
        chances = longer
    return np.cumsum(chances)

"""Hodges-Lehmann: the centre of symmetric differences, whatever their tails are, and its interval.

The estimate is the median of the means of all pairs of differences, each with itself too (Hodges & Lehmann,
Annals of Mathematical Statistics 34, 1963). One wild round hardly moves it. Its interval inverts Wilcoxon's
signed-rank test, so that it holds for every symmetric distribution (Hollander, Wolfe & Chicken, Nonparametric
Statistical Methods, 2014, section 3.3), where there are rounds enough for one. The rule does not decide by
it: see `sequential`.
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

# Up to here the distribution of the signed-rank statistic is counted out; above it is normal to three digits.
_EXACT = 200


@dataclass(frozen=True)
class HodgesLehmann:
    """The centre of differences.

    Attributes:
        estimate: in the unit of the differences.
        low: the centre is not below it; -inf where the differences are too few to say so.
        high: the centre is not above it; inf likewise.
        level: the chance that the interval has the centre: at least what was asked for, since ranks are whole
            numbers; 1 where it is infinite.
    """

    estimate: float
    low: float
    high: float
    level: float


def hodges_lehmann(differences: Sequence[float], level: float = 0.95) -> HodgesLehmann:
    """The centre of `differences`, with an interval that assumes no more than symmetry about it.

    An interval at 95 % takes 6 differences, at 99 % 8.

    Args:
        differences: independent of each other, in any order.
        level: of the interval.

    Raises:
        ValueError: no differences, or one that is not finite; a level that is not between 0 and 1.
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
    """The rank from either end at which the interval ends, and its level; 0 where no rank is far enough out.

    The centre is below the mean of rank r if at most r - 1 of the means of pairs are below it, and their
    number is Wilcoxon's statistic.
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
    """The chance that the signed-rank statistic of so many differences is at most 0, 1, 2 and so on."""
    chances = np.array([1.0])
    for rank in range(1, count + 1):
        longer = np.zeros(chances.size + rank)
        longer[: chances.size] += chances / 2
        longer[rank:] += chances / 2
        chances = longer
    return np.cumsum(chances)

"""Change points: places at which a series changes, by E-divisive means with a permutation test.

Matteson and James, "A nonparametric approach for multiple change point analysis of multivariate data"
(Journal of the American Statistical Association 109, 2014), for one dimension and distances |x - y|. The best
split of a segment has the largest energy distance between its two parts. The second part may stop before the
end of the segment. A permutation test, which shuffles each segment of the series, shows if the best split of
all segments is more than chance. The p-value of a t test would ignore that the best split was selected.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stackwise.support.arguments import check_number, check_sizes, require

__all__ = ["ChangePoint", "change_points", "latest_segment"]

_Floats = NDArray[np.float64]
# Relative difference of a statistic between two orders of the same sums.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class ChangePoint:
    """Place at which a series changes.

    Attributes:
        index: index of the first value after the change.
        p: share of the series, shuffled or original, with a split at least as good.
    """

    index: int
    p: float


def change_points(
    values: Sequence[float],
    *,
    alpha: float = 0.01,
    min_size: int = 4,
    permutations: int = 99,
    seed: int = 0,
) -> list[ChangePoint]:
    """Return all change points of a series, in order.

    The search continues until the best remaining split may be chance. If the values are independent and the
    series never changes, the probability of a change point is at most `alpha`. Values that drift are reported
    as changes, as by any such test.

    Args:
        values: values in order.
        alpha: largest p-value of a change point.
        min_size: minimum size of a segment, at least 2.
        permutations: maximum number of permutations per test. A test stops early if p can no longer be as
            small as `alpha`.
        seed: seed of the permutations.

    Raises:
        ValueError: numbers out of range, or too few permutations for a p-value as small as `alpha`.
    """
    check_number("alpha", alpha, "a number between 0 and 1", lambda value: 0 < value < 1)
    check_sizes(2, min_size=min_size)
    check_sizes(permutations=permutations)
    least = 1 / (permutations + 1)
    require(least <= alpha, "permutations", permutations, f"so many that 1 / (permutations + 1) <= {alpha}")
    series = np.asarray(values, dtype=np.float64)
    require(bool(np.isfinite(series).all()), "values", values, "finite numbers")
    random = np.random.default_rng(seed)
    bounds, found = [0, len(series)], []
    while True:
        segments = [series[start:end] for start, end in itertools.pairwise(bounds)]
        splits = [_best_split(segment, min_size) for segment in segments]
        best = max(range(len(splits)), key=lambda number: splits[number][0])
        statistic, offset = splits[best]
        if offset is None:
            break
        p = _p_value(statistic, segments, min_size, random, permutations, alpha)
        if p > alpha:
            break
        found.append(ChangePoint(bounds[best] + offset, p))
        bounds.insert(best + 1, bounds[best] + offset)
    return sorted(found, key=lambda change: change.index)


def latest_segment(values: Sequence[float], **options: float) -> int:
    """Return the start of the latest segment of a series: the index of its last change point, or 0.

    Args:
        values: values in order.
        options: options of `change_points`.
    """
    changes = change_points(values, **options)  # type: ignore[arg-type]
    return changes[-1].index if changes else 0


def _p_value(
    statistic: float,
    segments: list[_Floats],
    min_size: int,
    random: np.random.Generator,
    permutations: int,
    alpha: float,
) -> float:
    """Return the share of series with shuffled segments, and this one, with a best split at least as good.

    If the share can no longer be as small as `alpha`, the remaining permutations are skipped: Besag and
    Clifford, "Sequential Monte Carlo p-values" (Biometrika 78, 1991).
    """
    as_good = 1
    for tried in range(1, permutations + 1):
        shuffled = max(_best_split(random.permutation(segment), min_size)[0] for segment in segments)
        as_good += shuffled >= statistic * (1 - _ROUNDING)
        if as_good / (permutations + 1) > alpha:
            return as_good / (tried + 1)
    return as_good / (permutations + 1)


def _best_split(values: _Floats, min_size: int) -> tuple[float, int | None]:
    """Return the largest statistic of a split and its place; -1 and None if the segment is too short."""
    count = len(values)
    if count < 2 * min_size:
        return -1.0, None
    of_across, of_first, of_all = _weights(count, min_size)
    # sums[i, j], for i <= j: sum of |a - b| over the first i + 1 values a and the first j + 1 values b.
    sums = np.abs(values[:, None] - values[None, :]).cumsum(axis=1)
    # Row by row, since cumsum would process the columns one after another.
    for row in range(1, count):
        sums[row, row:] += sums[row - 1, row:]
    within = sums.diagonal().copy()  # each pair counts twice
    sums *= of_across
    sums -= of_first * within[:, None]
    sums -= of_all * within[None, :]
    place = int(sums.argmax())
    return float(sums.flat[place]), place // count + 1


@functools.lru_cache(maxsize=8)
def _weights(count: int, min_size: int) -> tuple[_Floats, _Floats, _Floats]:
    """Return the weights of three sums in the statistic of each split of a segment.

    The statistic of x, the first n values, and y, the next m values, is n m / (n + m) times their energy
    distance: 2 E|x - y| - E|x - x'| - E|y - y'|, with means over pairs of different values. S(a, b) is the
    sum of all distances between the first a and the first b values. The sum between x and y is then S(n, n +
    m) - S(n, n). The sum within y is S(n + m, n + m) + S(n, n) - 2 S(n, n + m).

    Returns:
        weights of S(n, n + m), of -S(n, n) and of -S(n + m, n + m), at [n - 1, n + m - 1]: 0 if x or y is
        shorter than `min_size`. float64, [count, count] each.
    """
    n = np.arange(1, count + 1, dtype=np.float64)[:, None]
    both = n.T
    m = both - n
    allowed = (n >= min_size) & (m >= min_size)
    n, m = np.where(allowed, n, 2.0), np.where(allowed, m, 2.0)
    across = 2 / (n + m)
    first, second = m / ((n + m) * (n - 1)), n / ((n + m) * (m - 1))
    found = across + 2 * second, across + first + second, second
    return tuple(np.where(allowed, each, 0.0) for each in found)  # type: ignore[return-value]

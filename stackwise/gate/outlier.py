"""Outlier: round in which the processes of one side were disturbed, so that it does not reflect the code.

On shared machines, about one process in some hundred is a tenth or a third slower than the rest for its full
lifetime. One such round among ten quiet ones widens Student's interval so much that no decision is possible
for dozens of rounds. Outliers are selected by their distance only, no matter which side was disturbed, so the
differences of identical code remain symmetric about 0. The unit of the distance is the median absolute
deviation, which outliers do not affect (Hampel, JASA 69, 1974). A distance of 25 is 17 standard deviations of
normal rounds. With 8 rounds, the median deviation may be half of its usual value. A limit of 10 would also
cut the long tail of skewed rounds and shift their mean: 3.9 % of identical code was flagged at 3 % of noise,
instead of 2.4 %.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["without_outliers"]

# Minimum number of rounds for an estimate of the usual deviation.
_LEAST_ROUNDS = 8
_DEVIATIONS = 25.0
# Minimum distance of an outlier in tolerances. A nearer round cannot hide a change that has to be found.
_TOLERANCES = 2.0
# Maximum share of outliers: one round in 6. A larger share is a property of the code.
_ONE_IN = 6
# Exact numbers, such as bytes, deviate only by rounding. They have no spread as a unit of the distance.
_ROUNDING = 1e-9


def without_outliers(differences: Sequence[float], tolerance: float) -> NDArray[np.float64]:
    """Return the differences without outliers, in their order.

    An outlier is more than 25 median absolute deviations and more than two tolerances from the median. No
    difference is removed in three cases: there are fewer than 8, more than one in 6 would be removed, or more
    than half are equal, such as numbers of bytes.

    Args:
        differences: log(head / base) of each round.
        tolerance: logarithm, see `Limit.at`.
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < _LEAST_ROUNDS:
        return values
    distances = np.abs(values - np.median(values))
    usual = float(np.median(distances))
    near = distances <= max(_DEVIATIONS * usual, _TOLERANCES * tolerance)
    few = len(values) - int(near.sum()) <= len(values) // _ONE_IN
    return values[near] if few and usual > _ROUNDING else values

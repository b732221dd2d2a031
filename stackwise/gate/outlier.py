"""Outlier: a round in which the processes of one side were wholly off, which says nothing of the code.

On shared machines one process in some hundred is a tenth or a third slower than its like for as long as it
lives. A round of these among ten quiet ones widens Student's interval so far that nothing can be told for
dozens of rounds. What is left out is chosen by its distance alone, whichever side was off, so that identical
code keeps differences that are symmetric about 0. The distance is counted in median absolute deviations,
which outliers do not move (Hampel, JASA 69, 1974); 25 of them are 17 standard deviations of normal rounds.
Of 8 rounds the median deviation may be half of what is usual: with 10 the long tail of skewed rounds would be
cut as well, and their mean moved (3.9 % of identical code flagged at 3 % of noise, in place of 2.4).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["without_outliers"]

# Of fewer rounds the deviations are too few to say what is usual.
_LEAST_ROUNDS = 8
_DEVIATIONS = 25.0
# What is nearer hides nothing that is to be found.
_TOLERANCES = 2.0
# More than one in so many are no outliers, but what the code does now and then.
_ONE_IN = 6
# Of exact numbers, as of bytes: what deviates by its rounding has no spread to be far from.
_ROUNDING = 1e-9


def without_outliers(differences: Sequence[float], tolerance: float) -> NDArray[np.float64]:
    """The differences that are not far from the others, in their order.

    Far is 25 median absolute deviations and two tolerances off the median. All of them stay where there are
    fewer than 8, where more than one in 6 is far off, or where more than half are equal, as numbers of bytes.

    Args:
        differences: of each round, log(head / base).
        tolerance: as a logarithm, see `Limit.at`.
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < _LEAST_ROUNDS:
        return values
    distances = np.abs(values - np.median(values))
    usual = float(np.median(distances))
    near = distances <= max(_DEVIATIONS * usual, _TOLERANCES * tolerance)
    few = len(values) - int(near.sum()) <= len(values) // _ONE_IN
    return values[near] if few and usual > _ROUNDING else values

"""Trend of a series: its rise per step, and the continuity of the rise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from stackwise.support.arguments import require

__all__ = ["LEAST_STEPS", "Trend", "trend"]

LEAST_STEPS = 8
_QUARTERS = 4
_NORMAL_99 = 2.5758  # two-sided


@dataclass(frozen=True)
class Trend:
    """Rise of a series.

    Attributes:
        per_step: median of the slopes between all pairs of steps (Theil and Sen). It is robust against up to
            29 % of outliers.
        low: lower end of the 99 % confidence interval of that median (Sen 1968, from the variance of
            Kendall's S).
        high: upper end of the interval.
        floors: minimum of each quarter of the series.
        least: smallest rise from one value to the next.
    """

    per_step: float
    low: float
    high: float
    floors: tuple[float, ...]
    least: float

    @property
    def goes_on(self) -> bool:
        """True if the floors rise in each quarter, and the last rise is at least half of the median rise.

        It is False if a buffer is filled and emptied within half of the series, or fills up in its first
        half.
        """
        rises = self._rises
        return all(rise > 0 for rise in rises) and rises[-1] >= 0.5 * median(rises)

    @property
    def each_step(self) -> bool:
        """True if every value is above the previous one."""
        return self.least > 0

    @property
    def fades(self) -> bool:
        """True if the last rise of the floors is less than three quarters of the first."""
        return self._rises[-1] < 0.75 * self._rises[0]

    @property
    def _rises(self) -> list[float]:
        return [after - before for before, after in pairwise(self.floors)]

    def exceeds(self, tolerance: float) -> bool:
        """Return True if the series continues to rise, and the interval is above `tolerance` per step."""
        return self.goes_on and self.low > tolerance

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "floors": list(self.floors), "goes_on": self.goes_on}


def trend(values: Sequence[float]) -> Trend:
    """Return the trend of values that were read at equal distances.

    Raises:
        ValueError: fewer than 8 values.
    """
    n = len(values)
    require(n >= LEAST_STEPS, "values", n, f"{LEAST_STEPS} or more of them")
    series = np.asarray(values, dtype=np.float64)
    earlier, later = np.triu_indices(n, k=1)
    slopes = np.sort((series[later] - series[earlier]) / (later - earlier))
    within = _NORMAL_99 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    lowest = max(0, math.floor((len(slopes) - within) / 2))
    highest = min(len(slopes) - 1, math.ceil((len(slopes) + within) / 2))
    return Trend(
        per_step=float(np.median(slopes)),
        low=float(slopes[lowest]),
        high=float(slopes[highest]),
        floors=tuple(float(quarter.min()) for quarter in np.array_split(series, _QUARTERS)),
        least=float(np.diff(series).min()),
    )

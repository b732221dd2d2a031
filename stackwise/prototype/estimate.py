"""Estimate: mean over seeds with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtrit

from stackwise.support.arguments import check_number, require

__all__ = ["Estimate"]


@dataclass(frozen=True)
class Estimate:
    """Mean with its confidence interval.

    The interval is Student's t over seeds. A bootstrap is not used, because it has too few samples: three
    seeds have only ten different means, and the interval is much too narrow.

    Attributes:
        value: the mean.
        low, high: ends of the interval. None for one seed.
        count: number of seeds.
        level: confidence level, the probability that such an interval contains the mean over all seeds.
    """

    value: float
    low: float | None
    high: float | None
    count: int
    level: float = 0.95

    @classmethod
    def of(cls, values: Sequence[float], level: float = 0.95) -> Estimate:
        """Return the estimate of `values`, one per seed.

        Raises:
            ValueError: no values, a value that is not finite, or a level outside (0, 1).
        """
        require(len(values) > 0, "values", len(values), "one or more")
        check_number("level", level, "a number above 0 and below 1", lambda number: 0 < number < 1)
        for value in values:
            check_number("values", value, "finite numbers", lambda _: True)
        mean, count = fmean(values), len(values)
        if count == 1:
            return cls(mean, None, None, 1, level)
        reach = float(stdtrit(count - 1, (1 + level) / 2)) * stdev(values) / math.sqrt(count)
        return cls(mean, mean - reach, mean + reach, count, level)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

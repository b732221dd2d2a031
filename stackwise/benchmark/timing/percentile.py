"""Percentile: what so many of all samples stay below, and how far it can be known.

The interval is between two of the samples themselves and holds for every distribution: how many samples fall
below the true percentile follows a binomial distribution (Hahn & Meeker, Statistical Intervals, 1991, section
5.2; David & Nagaraja, Order Statistics, 2003, section 7.1). It takes samples to be independent; where slow
calls come in bursts it is too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stackwise.support.arguments import check_number

__all__ = ["Percentile", "least_count", "percentile"]

# A percentile is told where at least so many samples are expected beyond it: their number then varies by a
# third, and its interval at 95 % ends before the outermost sample. For p99 that is 1000 samples, for p95 200.
_BEYOND = 10


@dataclass(frozen=True)
class Percentile:
    """One percentile of samples.

    Attributes:
        q: which one, in percent.
        value: interpolated between two neighbours; None where `count` is below `least_count(q)`.
        low: the sample that is not above the true percentile, with the confidence asked for; None with
            `value`, and where no sample is low enough to say so.
        high: the sample that is not below it; likewise.
        count: of the samples.
        confidence: of the interval.
    """

    q: float
    value: float | None
    low: float | None
    high: float | None
    count: int
    confidence: float = 0.95

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def least_count(q: float) -> int:
    """The fewest samples of which percentile `q` is told.

    Ten are to be expected beyond it, on its shorter side. Half of all samples are beyond the median however
    few there are, so that it is told of any.
    """
    return 1 if q == 50 else math.ceil(round(_BEYOND * 100 / min(q, 100 - q), 6))


def percentile(samples: Sequence[float], q: float, *, confidence: float = 0.95) -> Percentile:
    """Percentile `q` of samples, with an interval of order statistics.

    Args:
        samples: in any order and unit.
        q: in percent, as in numpy: 99 is the value that 99 % stay below.
        confidence: that the true percentile is between `low` and `high`.

    Raises:
        ValueError: no samples; `q` from 0 to 1, which is rather a fraction, or beyond 99.999;
            a confidence that is not between 0 and 1.
    """
    check_number("q", q, "a number from 1 to 99.999, in percent", lambda value: 1 <= value <= 99.999)
    check_number("confidence", confidence, "a number between 0 and 1", lambda value: 0 < value < 1)
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    count = len(ordered)
    if not count:
        raise ValueError("samples: got none; allowed: one or more")
    if count < least_count(q):
        return Percentile(q, None, None, None, count, confidence)
    below, above = _ranks(count, q / 100, (1 - confidence) / 2)
    return Percentile(
        q,
        float(np.percentile(ordered, q)),
        float(ordered[below - 1]) if below >= 1 else None,
        float(ordered[above - 1]) if above <= count else None,
        count,
        confidence,
    )


def _ranks(count: int, fraction: float, risk: float) -> tuple[int, int]:
    """The ranks, from 1, between which the percentile is; it is outside with at most `risk` on either side.

    The sample of rank r is above the percentile if fewer than r samples are below it.
    """
    numbers = np.arange(count + 1)
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, count + 1)))))
    log_probability = (
        log_factorial[count]
        - log_factorial
        - log_factorial[::-1]
        + numbers * math.log(fraction)
        + (count - numbers) * math.log1p(-fraction)
    )
    at_most = np.cumsum(np.exp(log_probability))
    lower = int(np.searchsorted(at_most, risk, side="right"))
    upper = int(np.searchsorted(at_most, 1 - risk, side="left")) + 1
    return lower, upper

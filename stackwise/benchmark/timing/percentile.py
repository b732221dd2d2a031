"""Percentiles of samples, with confidence intervals.

Both ends of an interval are samples, and it holds for every distribution: the number of samples below the
true percentile follows a binomial distribution (Hahn & Meeker, Statistical Intervals, 1991, section 5.2;
David & Nagaraja, Order Statistics, 2003, section 7.1). It assumes independent samples. If slow calls occur in
bursts, it is too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stackwise.support.arguments import check_number

__all__ = ["Percentile", "least_count", "percentile"]

# A percentile is reported if at least this number of samples is expected beyond it. Their number then varies
# by a third, and the interval at 95 % does not reach the outermost sample. For p99 this requires 1000
# samples, for p95 200.
_BEYOND = 10


@dataclass(frozen=True)
class Percentile:
    """One percentile of samples.

    Attributes:
        q: percentile in percent.
        value: percentile, interpolated between two adjacent samples. None if `count` is below
            `least_count(q)`.
        low: lower end of the confidence interval, one of the samples. None if `value` is None, or if no
            sample is low enough for the confidence level.
        high: upper end of the confidence interval, with the same rules.
        count: number of samples.
        confidence: confidence level of the interval.
    """

    q: float
    value: float | None
    low: float | None
    high: float | None
    count: int
    confidence: float = 0.95

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def least_count(q: float) -> int:
    """Return the minimum number of samples for which percentile `q` is reported.

    At least ten samples must be expected beyond it, on its shorter side. The median is always reported,
    because half of all samples are beyond it.
    """
    return 1 if q == 50 else math.ceil(round(_BEYOND * 100 / min(q, 100 - q), 6))


def percentile(samples: Sequence[float], q: float, *, confidence: float = 0.95) -> Percentile:
    """Return percentile `q` of samples, with a confidence interval from order statistics.

    Args:
        samples: samples in any order and unit.
        q: percentile in percent, as in numpy: 99 % of the samples are below percentile 99.
        confidence: probability that the true percentile is between `low` and `high`.

    Raises:
        ValueError: no samples; `q` below 1, which is probably a fraction, or above 99.999; a confidence that
            is not between 0 and 1.
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
    """Return the ranks, from 1, of the interval.

    The percentile is outside with at most `risk` on either side.

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

"""Rates: how often rules alarm, miss and cannot say, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scipy.stats import beta

from bench.gate.runs import Decided

__all__ = ["Point", "Rate", "at_false_alarms", "rate", "roc"]


@dataclass(frozen=True)
class Rate:
    """How many of how many, and the 95 % interval of Clopper and Pearson around their share.

    Attributes:
        hits: of them.
        n: of all.
        low, high: ends of the interval; 0 and 1 where there are none.
    """

    hits: int
    n: int
    low: float
    high: float

    @property
    def value(self) -> float | None:
        """The share; None of none."""
        return self.hits / self.n if self.n else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "value": self.value}

    def __str__(self) -> str:
        if not self.n:
            return "-"
        return f"{self.hits / self.n:.1%} of {self.n} [{self.low:.1%}, {self.high:.1%}]"

    @classmethod
    def of(cls, hits: int, n: int, confidence: float = 0.95) -> Rate:
        """Of counts.

        Raises:
            ValueError: more hits than there are, or a number below 0.
        """
        if not 0 <= hits <= n:
            raise ValueError(f"hits: got {hits}; allowed: 0 to {n}")
        tail = (1 - confidence) / 2
        low = float(beta.ppf(tail, hits, n - hits + 1)) if hits else 0.0
        high = float(beta.ppf(1 - tail, hits + 1, n - hits)) if hits < n else 1.0
        return cls(hits, n, low, high)


def rate(decisions: Iterable[Decided], is_hit: Callable[[Decided], bool]) -> Rate:
    """Of decisions."""
    said = [is_hit(each) for each in decisions]
    return Rate.of(sum(said), len(said))


@dataclass(frozen=True)
class Point:
    """A rule whose threshold was moved.

    Attributes:
        threshold: estimates above it are alarms.
        false_alarms: share of decisions about nothing.
        detected: share of decisions about something.
    """

    threshold: float
    false_alarms: float
    detected: float


def roc(nothing: Sequence[float], something: Sequence[float]) -> list[Point]:
    """Every threshold that makes a difference, from one that never alarms on down.

    Args:
        nothing: estimates without an effect.
        something: estimates with one.

    Raises:
        ValueError: none of one kind.
    """
    if not nothing or not something:
        counts = f"{len(nothing)} without an effect and {len(something)} with one"
        raise ValueError(f"estimates: got {counts}; allowed: some of both")
    points = [Point(math.inf, 0.0, 0.0)]
    for threshold in sorted({*nothing, *something}, reverse=True):
        if threshold == -math.inf:
            break  # what no threshold makes an alarm
        points.append(
            Point(
                threshold,
                sum(value >= threshold for value in nothing) / len(nothing),
                sum(value >= threshold for value in something) / len(something),
            )
        )
    return points


def at_false_alarms(points: Sequence[Point], most: float) -> Point:
    """The point that detects most of those with at most this share of false alarms."""
    return max((point for point in points if point.false_alarms <= most), key=lambda point: point.detected)

"""Spearman's rank correlation, with a bootstrap interval over what is ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["RankCorrelation", "average_ranks", "rank_correlation", "spearman", "stepped_up"]

Numbers = Sequence[float] | npt.NDArray[np.float64]
_RESAMPLES = 10_000


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's rho of pairs, and between which bounds 95 % of the resamples are.

    Attributes:
        rho: of all pairs; None: there are fewer than three.
        low, high: percentiles 2.5 and 97.5 over resamples of the pairs with replacement; None as `rho`.
        n: how many pairs.
    """

    rho: float | None
    low: float | None
    high: float | None
    n: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        if self.rho is None or self.low is None or self.high is None:
            return f"- of {self.n}"
        return f"{self.rho:.2f} [{self.low:.2f}, {self.high:.2f}] of {self.n}"


def average_ranks(values: Numbers) -> npt.NDArray[np.float64]:
    """Ranks from 1 along the last dimension, of equal values their mean; (..., N)."""
    array = np.asarray(values, dtype=np.float64)
    one, other = array[..., :, None], array[..., None, :]
    before, alike = (other < one).sum(-1), (other == one).sum(-1)
    return np.asarray(before + (alike + 1) / 2, dtype=np.float64)


def spearman(x: Numbers, y: Numbers) -> float:
    """The correlation of average ranks. Where all of x or all of y are equal it is 0: no order is told.

    Raises:
        ValueError: they are not of one length, or hold NaN.
    """
    if len(x) != len(y):
        raise ValueError(f"y: got {len(y)} values; allowed: {len(x)}, as many as x")
    a, b = (np.asarray(each, dtype=np.float64) for each in (x, y))
    if np.isnan(a).any() or np.isnan(b).any():
        raise ValueError("x, y: got NaN; allowed: numbers that have an order")
    return float(_rhos(a[None], b[None])[0])


def rank_correlation(
    pairs: Sequence[tuple[float, float]], *, resamples: int = _RESAMPLES, seed: int = 0
) -> RankCorrelation:
    """Spearman's rho of (x, y) pairs and its percentile bootstrap interval (Efron & Tibshirani 1993)."""
    n = len(pairs)
    if n < 3:
        return RankCorrelation(None, None, None, n)
    x, y = (np.asarray(column, dtype=np.float64) for column in zip(*pairs, strict=True))
    drawn = np.random.default_rng(seed).integers(n, size=(resamples, n))
    low, high = np.percentile(_rhos(x[drawn], y[drawn]), [2.5, 97.5])
    return RankCorrelation(spearman(x, y), float(low), float(high), n)


def stepped_up(rho: float | None) -> float | None:
    """The reliability of the mean of two measurements whose correlation is `rho` (Spearman and Brown 1910).

    None: there is no rho, or it is negative, which no reliability is.
    """
    return None if rho is None or rho < 0 else 2 * rho / (1 + rho)


def _rhos(x_RN: npt.NDArray[np.float64], y_RN: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """One of each row; (R,)."""
    a, b = (ranks - ranks.mean(-1, keepdims=True) for ranks in (average_ranks(x_RN), average_ranks(y_RN)))
    sizes = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    return np.asarray(np.divide((a * b).sum(-1), sizes, out=np.zeros_like(sizes), where=sizes > 0))

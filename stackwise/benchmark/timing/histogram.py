"""Histogram: samples of a latency as counts, for a plot that needs no samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["histogram"]

_FEWEST = 5
_MOST_BINS = 60


def histogram(samples: Sequence[float]) -> dict[str, Any] | None:
    """Return counts of samples in bins of equal width, or None for fewer than five samples.

    The last edge is at or above the 99th percentile of the samples, so that a few slow samples do not hide
    the shape of the distribution. The width is that of Freedman and Diaconis, and the maximum is 60 bins.

    Args:
        samples: seconds.

    Returns:
        "edges": seconds, in increasing order. "counts": samples in each bin, one fewer than edges. "above":
        number of samples beyond the last edge.
    """
    values = np.asarray(samples, dtype=np.float64)
    if len(values) < _FEWEST:
        return None
    most = np.percentile(values, 99)
    inside = values[values <= most + 0.25 * (most - values.min())]
    low, high = np.percentile(inside, (25, 75))
    width = 2 * (high - low) / len(inside) ** (1 / 3)
    bins = math.ceil(np.ptp(inside) / width) if width > 0 else _MOST_BINS
    counts, edges = np.histogram(inside, bins=min(max(bins, 1), _MOST_BINS))
    return {
        "edges": [float(edge) for edge in edges],
        "counts": [int(count) for count in counts],
        "above": len(values) - len(inside),
    }

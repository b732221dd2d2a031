"""Pareto front: points that no other point dominates, and the area that they dominate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stackwise.support.arguments import require

__all__ = ["dominates", "hypervolume", "non_dominated"]


def dominates(point: Sequence[float], other: Sequence[float]) -> bool:
    """Return True if `point` is not worse in any coordinate and better in one. Lower is better."""
    return all(a <= b for a, b in zip(point, other, strict=True)) and tuple(point) != tuple(other)


def non_dominated(points: Sequence[Sequence[float]]) -> list[int]:
    """Return the indices of the non-dominated points in order. Equal points are all included.

    Args:
        points: (N, M) numbers without NaN. Lower is better.

    Raises:
        ValueError: a point with NaN, or of another length.
    """
    _check(points)
    # In lexicographic order, no point is dominated by a later one, so comparing with the previous front is
    # enough.
    order = sorted(range(len(points)), key=lambda index: tuple(points[index]))
    front: list[int] = []
    for index in order:
        if not any(dominates(points[other], points[index]) for other in front):
            front.append(index)
    return sorted(front)


def hypervolume(points: Sequence[Sequence[float]], reference: Sequence[float]) -> float:
    """Return the area between points and a reference point in two dimensions. It is exact.

    Args:
        points: (N, 2) numbers. Lower is better. Points beyond the reference are ignored.
        reference: (2,) point that is worse than all relevant points.

    Raises:
        ValueError: other than two coordinates, or NaN.
    """
    _check([*points, reference])
    require(len(reference) == 2, "reference", len(reference), "two coordinates")
    inside = sorted(tuple(p) for p in points if p[0] < reference[0] and p[1] < reference[1])
    area, height = 0.0, reference[1]
    for x, y in inside:
        if y < height:
            area += (reference[0] - x) * (height - y)
            height = y
    return area


def _check(points: Sequence[Sequence[float]]) -> None:
    for number, point in enumerate(points):
        key = f"points[{number}]"
        require(len(point) == len(points[0]), key, len(point), f"{len(points[0])} coordinates, as the first")
        require(not any(math.isnan(value) for value in point), key, tuple(point), "numbers without NaN")

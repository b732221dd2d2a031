"""The Pareto front: what nothing else is better than in every respect, and the room that it dominates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stackwise.support.arguments import require

__all__ = ["dominates", "hypervolume", "non_dominated"]


def dominates(point: Sequence[float], other: Sequence[float]) -> bool:
    """Whether `point` is no worse in any coordinate and better in one; all are to be small."""
    return all(a <= b for a, b in zip(point, other, strict=True)) and tuple(point) != tuple(other)


def non_dominated(points: Sequence[Sequence[float]]) -> list[int]:
    """Indices of the points that no other one dominates, in their order; equal ones are all kept.

    Args:
        points: (N, M) numbers without NaN, each to be small.

    Raises:
        ValueError: a point with NaN, or of another length.
    """
    _check(points)
    # In lexicographic order none is dominated by one behind it, and it is enough to look at the front so far.
    order = sorted(range(len(points)), key=lambda index: tuple(points[index]))
    front: list[int] = []
    for index in order:
        if not any(dominates(points[other], points[index]) for other in front):
            front.append(index)
    return sorted(front)


def hypervolume(points: Sequence[Sequence[float]], reference: Sequence[float]) -> float:
    """The area between points and a reference that one of them dominates at least; exact, in two coordinates.

    Args:
        points: (N, 2) numbers, each to be small; those beyond the reference count nothing.
        reference: (2,) a point that is worse than all that matters.

    Raises:
        ValueError: coordinates that are not two, or NaN.
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

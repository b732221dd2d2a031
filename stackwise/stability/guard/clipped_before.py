"""ClippedBefore: detects gradients that were clipped before the guard sees them, which hides every spike."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["ClippedBefore"]

_STEPS = 8  # consecutive equal norms that are not a coincidence
_SAME = 1e-5  # relative change of the norm that is treated as none
_OTHER = 1e-3  # change of a parameter's norm, relative to the norm, that shows another gradient


class ClippedBefore:
    """Detector of steps with equal gradient norms although the norms of parameters differ."""

    def __init__(self) -> None:
        self._norm = math.nan
        self._norms: Mapping[str, float] = {}
        self._in_row = 0
        self._is_told = False

    def tells(self, norm: float, norms: Mapping[str, float]) -> bool:
        """Record a healthy step. Return True once, after enough consecutive steps with equal norms.

        Args:
            norm: norm of all gradients.
            norms: gradient norm of each parameter, by name.
        """
        alike = abs(norm - self._norm) <= _SAME * norm and any(
            abs(each - self._norms.get(name, each)) > _OTHER * norm for name, each in norms.items()
        )
        self._in_row = self._in_row + 1 if alike else 0
        self._norm, self._norms = norm, norms
        if self._is_told or self._in_row < _STEPS:
            return False
        self._is_told = True
        return True

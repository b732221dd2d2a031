"""ClippedBefore: whether gradients are clipped before a guard sees them, which hides every spike."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["ClippedBefore"]

_STEPS = 8  # in a row, after which it is no chance
_SAME = 1e-5  # of the norm: what is left of its changes where it is clipped
_OTHER = 1e-3  # of the norm: what the norm of a parameter changes by all the same


class ClippedBefore:
    """Norms of sound steps that stay the same as a whole, and not by parameter."""

    def __init__(self) -> None:
        self._norm = math.nan
        self._norms: Mapping[str, float] = {}
        self._in_row = 0
        self._is_told = False

    def tells(self, norm: float, norms: Mapping[str, float]) -> bool:
        """Take a step in; True once, where so many in a row are alike.

        Args:
            norm: of its whole gradient.
            norms: of each parameter's, by name.
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

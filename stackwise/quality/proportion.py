"""Proportion: share of examples, with its standard error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from stackwise.support.arguments import require

__all__ = ["Proportion"]


@dataclass(frozen=True)
class Proportion:
    """Share of examples.

    Attributes:
        hits: number of hits.
        count: number of examples, at least one.
    """

    hits: int
    count: int

    @classmethod
    def of(cls, hits: np.ndarray) -> Proportion:
        """Return the proportion of True in bools (examples,).

        Raises:
            ValueError: there are no examples.
        """
        require(len(hits) > 0, "examples", 0, "at least one")
        return cls(int(np.sum(hits)), len(hits))

    @property
    def value(self) -> float:
        """Share of hits, 0 to 1."""
        return self.hits / self.count

    @property
    def standard_error(self) -> float | None:
        """Standard error of `value` as an estimate for other examples of this kind.

        None for a single example.
        """
        if self.count < 2:
            return None
        return math.sqrt(self.value * (1 - self.value) / (self.count - 1))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"value": self.value, "standard_error": self.standard_error, "examples": self.count}

    def __str__(self) -> str:
        error = self.standard_error
        return f"{self.value:.4f}" + ("" if error is None else f" ± {error:.4f}")

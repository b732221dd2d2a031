"""Drift: whether the machine itself is as fast as it was, by the reference's time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from scipy.special import stdtrit

from stackwise.gate.history.reference import ReferenceTime
from stackwise.support.arguments import check_number

__all__ = ["MIN_RUNS", "Band"]

# Of fewer runs it is not known how far they differ.
MIN_RUNS = 8
# No band is narrower: a machine that repeated itself eight times is still allowed this much.
_NARROWEST = math.log1p(0.02)
_PARTS = {"gemm": "the product of matrices", "copy": "the copy of memory"}


@dataclass(frozen=True)
class Band:
    """Between what the reference's times are expected in the next run.

    Slow drift moves the band with it, and the ratios to the reference do not know it. What is outside came at
    once: another clock, a neighbour, memory that is slower while the processor is not. There the ratio of a
    test to the reference may be another as well, and nothing is said about the test.

    Attributes:
        gemm: seconds of the product of matrices, least and most.
        copy: seconds of the copy of memory, least and most.
        runs: that it is made of.
    """

    gemm: tuple[float, float]
    copy: tuple[float, float]
    runs: int

    @classmethod
    def of(cls, references: Sequence[ReferenceTime], *, alpha: float = 0.001) -> Self | None:
        """The prediction interval of the next run by Student's t, of logarithms, at least 2 % to each side.

        Args:
            references: of the runs before, one each.
            alpha: the chance that a run of the same machine is outside, of each part.

        Returns:
            None where there are fewer than 8 runs.
        """
        check_number("alpha", alpha, "a number between 0 and 1", lambda value: 0 < value < 1)
        count = len(references)
        if count < MIN_RUNS:
            return None
        quantile = -float(stdtrit(count - 1, alpha / 2)) * math.sqrt(1 + 1 / count)
        found = {}
        for part in _PARTS:
            logs = [math.log(getattr(each, part)) for each in references]
            middle = statistics.fmean(logs)
            half = max(quantile * statistics.stdev(logs), _NARROWEST)
            found[part] = math.exp(middle - half), math.exp(middle + half)
        return cls(**found, runs=count)

    def outside(self, reference: ReferenceTime) -> str:
        """What of the reference is outside of the band, in words; "" where nothing is."""
        said = []
        for part, name in _PARTS.items():
            (low, high), seconds = getattr(self, part), getattr(reference, part)
            if not low <= seconds <= high:
                expected = f"{low * 1e3:.3g} to {high * 1e3:.3g} ms"
                said.append(f"{name} took {seconds * 1e3:.3g} ms where {expected} were expected")
        return " and ".join(said)

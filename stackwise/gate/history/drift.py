"""Drift: change of the machine's speed, detected by the time of the reference."""

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

# Minimum number of runs for an estimate of their spread.
MIN_RUNS = 8
# Minimum distance of the limits from the mean, even if eight runs were equal.
_NARROWEST = math.log1p(0.02)
_PARTS = {"gemm": "the product of matrices", "copy": "the copy of memory"}


@dataclass(frozen=True)
class Band:
    """Expected times of the reference in the next run.

    Slow drift moves the band, and the ratios to the reference cancel it. A time outside of the band is a
    sudden change: another clock rate, a busy neighbour, or memory that became slower while the processor did
    not. The ratio of a test to the reference may then be different too, so the test is not judged.

    Attributes:
        gemm: minimum and maximum seconds of the matrix product.
        copy: minimum and maximum seconds of the memory copy.
        runs: number of runs from which the band is computed.
    """

    gemm: tuple[float, float]
    copy: tuple[float, float]
    runs: int

    @classmethod
    def of(cls, references: Sequence[ReferenceTime], *, alpha: float = 0.001) -> Self | None:
        """Return the prediction interval of the next run.

        It is Student's t interval of the logarithms, and at least 2 % to each side.

        Args:
            references: reference times of the previous runs, one each.
            alpha: probability that a run of the same machine is outside of the band, per part.

        Returns:
            the band; None with fewer than 8 runs.
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
        """Return a sentence on the parts of the reference that are outside of the band; "" if none is."""
        said = []
        for part, name in _PARTS.items():
            (low, high), seconds = getattr(self, part), getattr(reference, part)
            if not low <= seconds <= high:
                expected = f"{low * 1e3:.3g} to {high * 1e3:.3g} ms"
                said.append(f"{name} took {seconds * 1e3:.3g} ms where {expected} were expected")
        return " and ".join(said)

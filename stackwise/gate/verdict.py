"""Verdict and Decision: result of a comparison, with its confidence interval."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from stackwise.support.arguments import require

__all__ = ["WORST_FIRST", "Decision", "Verdict"]


class Verdict(StrEnum):
    """Verdict of a comparison of head with base."""

    PASS = "PASS"  # noqa: S105 - no password
    IMPROVED = "IMPROVED"
    REGRESSED = "REGRESSED"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def ok(self) -> bool:
        """True for PASS and IMPROVED: the head needs no change."""
        return self in (Verdict.PASS, Verdict.IMPROVED)


WORST_FIRST = (Verdict.REGRESSED, Verdict.INCONCLUSIVE, Verdict.IMPROVED, Verdict.PASS)


@dataclass(frozen=True)
class Decision:
    """Verdict with its evidence.

    Attributes:
        verdict: the verdict.
        estimate: relative change of the cost from base to head: 0.02 is 2 % more. NaN without any round.
        low: lower end of the confidence interval; -inf if the rounds are too few.
        high: upper end of the confidence interval; inf if the rounds are too few.
        level: confidence level of the interval, which does not depend on the number of rounds; 0 without an
            interval.
        rounds: number of rounds, including the confirmation.
        confirmed: True if fresh rounds have confirmed the verdict. The estimate and the interval are then
            from the fresh rounds only, because the first rounds were selected for a large difference. If the
            time limit was reached before enough fresh rounds, they are from all rounds together, at a
            stricter level.
        reason: reason for the verdict, in one sentence.
    """

    verdict: Verdict
    estimate: float
    low: float
    high: float
    level: float
    rounds: int
    confirmed: bool
    reason: str

    def __post_init__(self) -> None:
        sound = math.isnan(self.estimate) or self.low <= self.estimate <= self.high
        require(sound, "estimate", self.estimate, f"a number from low to high ({self.low} to {self.high})")

    @classmethod
    def undecided(cls, reason: str, estimate: float = math.nan, rounds: int = 0) -> Self:
        """Create an INCONCLUSIVE decision without an interval."""
        return cls(
            Verdict.INCONCLUSIVE, estimate, -math.inf, math.inf, 0.0, rounds, confirmed=False, reason=reason
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON. JSON has no NaN and no infinity, so these become None."""
        values = asdict(self)
        for key in ("estimate", "low", "high"):
            values[key] = values[key] if math.isfinite(values[key]) else None
        return {**values, "verdict": str(self.verdict)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Create the decision from the values of `to_dict`, also after a round trip through JSON.

        Raises:
            ValueError: an unknown verdict.
        """
        known = [str(each) for each in Verdict]
        require(values["verdict"] in known, "verdict", values["verdict"], ", ".join(known))
        absent = {"estimate": math.nan, "low": -math.inf, "high": math.inf}
        found = {key: absent[key] for key in absent if values[key] is None}
        return cls(**{**values, **found, "verdict": Verdict(values["verdict"])})

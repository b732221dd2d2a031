"""Verdict and Decision: what came of a comparison, and how far it can be believed."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from stackwise.support.arguments import require

__all__ = ["Decision", "Verdict"]


class Verdict(StrEnum):
    """What a comparison of head with base came to."""

    PASS = "PASS"  # noqa: S105 - no password
    IMPROVED = "IMPROVED"
    REGRESSED = "REGRESSED"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def ok(self) -> bool:
        """Whether head may stay as it is: PASS and IMPROVED."""
        return self in (Verdict.PASS, Verdict.IMPROVED)


@dataclass(frozen=True)
class Decision:
    """A verdict, with what it was decided from.

    Attributes:
        verdict: what it is.
        estimate: relative change of the cost from base to head: 0.02 is 2 % more. NaN where there was no
            round to estimate it from.
        low: the change is not below it; -inf where too few rounds were made to say so.
        high: the change is not above it; inf likewise.
        level: the chance that the interval has the true change, whatever the number of rounds it took; 0
            where there is none.
        rounds: that were made, those of the confirmation too.
        confirmed: whether the verdict was found a second time, in fresh rounds. The estimate and the interval
            are then of these alone, as the first ones were chosen for being large; where the time was up
            before they were enough, of all rounds together, which were held to more.
        reason: why it is this verdict, in one sentence.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what is not finite, which JSON has no numbers for, is None."""
        values = asdict(self)
        for key in ("estimate", "low", "high"):
            values[key] = values[key] if math.isfinite(values[key]) else None
        return {**values, "verdict": str(self.verdict)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """What `to_dict` gave, also where it went through JSON.

        Raises:
            ValueError: an unknown verdict.
        """
        known = [str(each) for each in Verdict]
        require(values["verdict"] in known, "verdict", values["verdict"], ", ".join(known))
        absent = {"estimate": math.nan, "low": -math.inf, "high": math.inf}
        found = {key: absent[key] for key in absent if values[key] is None}
        return cls(**{**values, **found, "verdict": Verdict(values["verdict"])})

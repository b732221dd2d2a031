"""Baseline: selection of the results by which later results are judged.

Only a PASS extends the baseline. A slower or faster result is never part of it: a regression must not become
the usual level because it was measured often enough. An undecided result is included after a later result of
its branch has passed. With passed results only, the baseline would contain the faster ones of many equal
results. A person can accept an intended new level, with a reason. Results are then used from this level on.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from stackwise.gate.verdict import Verdict

__all__ = ["Baseline", "Standing"]


class Standing(StrEnum):
    """Use of a result in the judgement of later results."""

    ACCEPTED = "accepted"  # used
    PENDING = "pending"  # used after a later result is accepted
    EXCLUDED = "excluded"  # not used, unless a person accepts it

    @classmethod
    def of(cls, verdict: Verdict | None) -> Standing:
        """Return the standing for a verdict; None: the result is undecided."""
        match verdict:
            case Verdict.PASS:
                return cls.ACCEPTED
            case Verdict.REGRESSED | Verdict.IMPROVED:
                return cls.EXCLUDED
        return cls.PENDING


@dataclass(frozen=True)
class Baseline:
    """Start of the results of a series that are used on a branch.

    Attributes:
        since: time of the first result that is used.
        commit: commit of the accepted result.
        reason: reason of the person who accepted it.
    """

    since: datetime
    commit: str
    reason: str

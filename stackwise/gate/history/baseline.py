"""Baseline: which results later ones are judged by.

Only a PASS moves the baseline on. A result that was found slower or faster never counts: what a regression
costs must not become what is usual by being measured often enough. One that was undecided counts when a later
one of its branch has passed: if only those counted that passed, they would be the faster ones of many that
are equal. A level that is meant to be new is accepted by a person, who says why, and counts from then on.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from stackwise.gate.verdict import Verdict

__all__ = ["Baseline", "Standing"]


class Standing(StrEnum):
    """Whether later results are judged by one."""

    ACCEPTED = "accepted"  # they are
    PENDING = "pending"  # when a later one is accepted
    EXCLUDED = "excluded"  # never, unless a person accepts it

    @classmethod
    def of(cls, verdict: Verdict | None) -> Standing:
        """Of a verdict; None: nothing was decided."""
        match verdict:
            case Verdict.PASS:
                return cls.ACCEPTED
            case Verdict.REGRESSED | Verdict.IMPROVED:
                return cls.EXCLUDED
        return cls.PENDING


@dataclass(frozen=True)
class Baseline:
    """From where on the results of a series count on a branch.

    Attributes:
        since: results of this time and later count.
        commit: of the result that somebody accepted.
        reason: why, in their words.
    """

    since: datetime
    commit: str
    reason: str

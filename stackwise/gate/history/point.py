"""Point: stored result of a test, with its run and its series.

A result also has a standing: only a PASS extends the baseline, by which later results are judged. A slower or
faster result is never part of it: a regression must not become the usual level because it was measured often
enough. An undecided result is included after a later result of its branch has passed. With passed results
only, the baseline would contain the faster ones of many equal results. A person can accept an intended new
level, with a reason. Results are then used from this level on.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

from stackwise.gate.history.machine import Machine
from stackwise.gate.history.reference import Referenced, ReferenceTime
from stackwise.gate.verdict import Verdict
from stackwise.support.arguments import require

__all__ = ["Baseline", "Point", "Result", "Run", "Series", "Standing"]


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
class Run:
    """Job that measured tests.

    Attributes:
        machine: machine of the job.
        commit: measured revision; "" without a revision.
        branch: branch of the revision; "" without a branch.
        created: time of the run, with a time zone.
        identity: unique ID of the run. A run that is stored already is not stored twice.
        notes: notes for the reader.

    Raises:
        ValueError: a time without a time zone.
    """

    machine: Machine
    commit: str = ""
    branch: str = ""
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.created.tzinfo is not None, "created", self.created.isoformat(), "a time with its zone")


@dataclass(frozen=True)
class Result:
    """Result of a run for one metric of one test.

    Attributes:
        test: node ID of the test.
        metric: "time", "memory", "ttft" or "tpot".
        level: cost in the metric's unit: seconds or bytes.
        log_ratio: log(test / reference), the median over turns; log(level) without a reference.
        reference: level of the reference's parts; None without a reference, as for memory.
        verdict: verdict on the result; None: not judged.
        decision: complete decision as plain values.
        standing: use in the judgement of later results; None: as the verdict implies.

    Raises:
        ValueError: a level that is not a positive number, a ratio that is not finite, or an empty name.
    """

    test: str
    metric: str
    level: float
    log_ratio: float
    reference: ReferenceTime | None = None
    verdict: Verdict | None = None
    decision: Mapping[str, Any] | None = None
    standing: Standing | None = None

    def __post_init__(self) -> None:
        for name in ("test", "metric"):
            require(bool(getattr(self, name)), name, getattr(self, name), "a name")
        _check_numbers(self.test, self.level, self.log_ratio)

    @classmethod
    def timed(cls, test: str, found: Referenced) -> Self:
        """Return the result of a test that was interleaved with the reference."""
        return cls(test, "time", found.level, found.log_ratio, found.reference_level)


@dataclass(frozen=True)
class Series:
    """All results of one metric of one test on one kind of machine.

    Attributes:
        machine: kind of machine.
        test: node ID of the test.
        metric: name of the metric.
        n_points: number of results.
        last: time of the newest result.
        last_commit: revision of the newest result.
        last_level: cost of the newest result.
        last_verdict: verdict on the newest result, or None.
    """

    machine: Machine
    test: str
    metric: str
    n_points: int
    last: datetime
    last_commit: str
    last_level: float
    last_verdict: Verdict | None


@dataclass(frozen=True)
class Point:
    """One result in its series.

    Attributes:
        id: ID in the store.
        created: time of the measurement.
        commit: measured revision.
        branch: branch of the run.
        level: cost in the metric's unit.
        log_ratio: value that is compared; see `Result`.
        reference: level of the reference's parts, or None.
        verdict: verdict on the result, or None.
        standing: use in the judgement of later results.

    Raises:
        ValueError: a level that is not a positive number, or a ratio that is not finite.
        TypeError: a level or a ratio that is not a number.
    """

    id: int
    created: datetime
    commit: str
    branch: str
    level: float
    log_ratio: float
    reference: ReferenceTime | None
    verdict: Verdict | None
    standing: Standing

    def __post_init__(self) -> None:
        _check_numbers(f"result {self.id}", self.level, self.log_ratio)


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


def _check_numbers(of: str, level: float, log_ratio: float) -> None:
    require(math.isfinite(level) and level > 0, f"level of {of}", level, "a number > 0")
    require(math.isfinite(log_ratio), f"log-ratio of {of}", log_ratio, "a finite number")

"""Point: one result of one test in the history, and the run that it came from."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

from stackwise.gate.history.baseline import Standing
from stackwise.gate.history.machine import Machine
from stackwise.gate.history.reference import Referenced, ReferenceTime
from stackwise.gate.verdict import Verdict
from stackwise.support.arguments import require

__all__ = ["Point", "Result", "Run", "Series"]


@dataclass(frozen=True)
class Run:
    """One job that measured tests.

    Attributes:
        machine: what it ran on.
        commit: the revision that was measured; "" where there is none.
        branch: that it belongs to; "" where there is none.
        created: when, with a time zone.
        identity: of the run: one that is stored already is not stored again.
        source: what measured: "gate", "pytest-benchmark", or a name of one's own.
        notes: what a reader must know.

    Raises:
        ValueError: a time without a zone.
    """

    machine: Machine
    commit: str = ""
    branch: str = ""
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    identity: str = field(default_factory=lambda: uuid.uuid4().hex)
    source: str = "gate"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.created.tzinfo is not None, "created", self.created.isoformat(), "a time with its zone")


@dataclass(frozen=True)
class Result:
    """What a run found of one metric of one test.

    Attributes:
        test: its node id.
        metric: "time", "memory", "ttft", "tpot".
        level: the cost, in the metric's unit: seconds or bytes.
        log_ratio: log(test / reference), the median over turns; without a reference log(level).
        reference: the level of the reference's parts; None where there was none, as of memory.
        verdict: what was decided of it; None: nothing was.
        decision: the whole of that as plain values.
        standing: whether later results are judged by it; None: as the verdict says.
        samples: raw, in their order.
        reference_samples: of the reference, in the same turns.

    Raises:
        ValueError: a level that is no positive number, a ratio or sample that is no number, or an empty name.
    """

    test: str
    metric: str
    level: float
    log_ratio: float
    reference: ReferenceTime | None = None
    verdict: Verdict | None = None
    decision: Mapping[str, Any] | None = None
    standing: Standing | None = None
    samples: tuple[float, ...] = ()
    reference_samples: tuple[ReferenceTime, ...] = ()

    def __post_init__(self) -> None:
        for name in ("test", "metric"):
            require(bool(getattr(self, name)), name, getattr(self, name), "a name")
        _check_numbers(self.test, self.level, self.log_ratio)
        wrong = [sample for sample in self.samples if not math.isfinite(sample)]
        require(not wrong, f"samples of {self.test}", wrong[:1], "finite numbers")

    @classmethod
    def timed(cls, test: str, found: Referenced, *, metric: str = "time", **others: Any) -> Self:
        """Of a test that was timed in turns with the reference."""
        return cls(
            test,
            metric,
            found.level,
            found.log_ratio,
            found.reference_level,
            samples=found.samples,
            reference_samples=found.reference,
            **others,
        )

    @classmethod
    def counted(cls, test: str, metric: str, samples: tuple[float, ...], **others: Any) -> Self:
        """Of what no machine makes slower, as bytes are: the largest of the samples, without a reference."""
        level = max(samples)
        return cls(test, metric, level, math.log(level), samples=samples, **others)


@dataclass(frozen=True)
class Series:
    """All results of one metric of one test on one kind of machine.

    Attributes:
        id: in the store.
        machine: what they were measured on.
        test: node id.
        metric: which cost.
        n_points: how many there are.
        last: when the newest was measured.
        last_commit: which revision that was.
        last_level: its cost.
        last_verdict: what was decided of it.
    """

    id: int
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
        id: in the store, by which its samples are found.
        created: when it was measured.
        commit: the revision.
        branch: of the run.
        level: the cost, in the metric's unit.
        log_ratio: what is compared; see `Result`.
        reference: the level of the reference's parts, or None.
        verdict: what was decided of it, or None.
        standing: whether later results are judged by it.

    Raises:
        ValueError: a level that is no positive number, or a ratio that is no number.
        TypeError: one of them is not even a number.
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


def _check_numbers(of: str, level: float, log_ratio: float) -> None:
    require(math.isfinite(level) and level > 0, f"level of {of}", level, "a number > 0")
    require(math.isfinite(log_ratio), f"log-ratio of {of}", log_ratio, "a finite number")

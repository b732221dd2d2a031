"""GateResult: everything that a comparison of two revisions came to, as data."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self, get_args

from stackwise.gate.hodges_lehmann import HodgesLehmann, hodges_lehmann
from stackwise.gate.verdict import Decision, Verdict
from stackwise.support.arguments import check_choice, require

__all__ = [
    "EXIT_INCONCLUSIVE",
    "EXIT_NOTHING",
    "EXIT_SETUP",
    "GateResult",
    "Headline",
    "Missing",
    "Outcome",
    "Status",
    "TestResult",
    "TrialResult",
]

EXIT_INCONCLUSIVE = 7
EXIT_SETUP = 4  # exit code of pytest after a usage error
EXIT_NOTHING = 5  # exit code of pytest if it finds no tests

Status = Literal[
    "measured",
    "skipped",
    "skipped on head",
    "set-up error",
    "not begun",
    "not measured",
    "unused",
    "missing on base",
    "missing on head",
    "crashed on base",
    "crashed on head",
    "hung on base",
    "hung on head",
]
Missing = Literal["fail", "warn", "create"]
Outcome = Literal["passed", "warned", "inconclusive", "error", "failed"]
Headline = Literal["PASS", "IMPROVED", "REGRESSED", "FAILED", "ERROR", "INCONCLUSIVE"]

_VERSION = 1
# What an outcome is of: the one farthest to the right.
_ORDER: tuple[Outcome, ...] = get_args(Outcome)
_OUTCOMES: dict[Verdict, Outcome] = {
    Verdict.PASS: "passed",
    Verdict.IMPROVED: "passed",
    Verdict.INCONCLUSIVE: "inconclusive",
    Verdict.REGRESSED: "failed",
}


@dataclass(frozen=True)
class TrialResult:
    """One metric of one test.

    Attributes:
        decision: what was decided.
        unit: of the levels: "s" or "B".
        tolerance: the share that head may cost more, as it was judged by (a floor may have raised it).
        minimum_effect: the share below which no estimate is a regression, likewise.
        differences: of each round log(head / base), the median over its pairs.
        base: what base cost in each round, in `unit`.
        head: what head cost in each round, in `unit`.
    """

    decision: Decision
    unit: str
    tolerance: float
    minimum_effect: float
    differences: tuple[float, ...]
    base: tuple[float, ...]
    head: tuple[float, ...]

    @property
    def levels(self) -> tuple[float, float] | None:
        """What base costs, the median of rounds, and what head does by the estimate; None without both.

        The median of head's own rounds would say something else beside the estimate: sides are compared
        within rounds, and the machine is not equally fast in all of them.
        """
        if not self.base or not self.head:
            return None
        base, estimate = statistics.median(self.base), self.decision.estimate
        return base, base * (1 + estimate) if math.isfinite(estimate) else statistics.median(self.head)

    @property
    def robust(self) -> HodgesLehmann | None:
        """The centre of the differences of all rounds, which no wild one moves, at 95 %; None without rounds.

        Where it is far from the estimate of the decision, some rounds are unlike the others.
        """
        return hodges_lehmann(self.differences) if self.differences else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, with `robust` as relative changes."""
        robust = self.robust
        ends = ("estimate", "low", "high")
        return {
            **asdict(self),
            "decision": self.decision.to_dict(),
            **{key: list(getattr(self, key)) for key in ("differences", "base", "head")},
            "robust": robust and {key: _share(getattr(robust, key)) for key in ends},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """What `to_dict` gave, also where it went through JSON."""
        rows = {key: tuple(values[key]) for key in ("differences", "base", "head")}
        kept = {key: value for key, value in values.items() if key != "robust"}
        return cls(**{**kept, **rows, "decision": Decision.from_dict(values["decision"])})


@dataclass(frozen=True)
class TestResult:
    """One test.

    Attributes:
        nodeid: pytest's name of the test, or another that is unique.
        status: "measured", or what came instead of a measurement, and on which side. "not begun": there was
            no time for it. "not measured": a side did not run the tests in their order, the system killed a
            side, or only one side called `benchmark` or `throughput`. "unused": neither side did. "set-up
            error": it cannot be measured until the test, the trees or the environment are changed; `detail`
            says how.
        trials: by metric ("time", "memory", "ttft", "tpot"); none where it was not measured.
        detail: the end of what a side wrote before it crashed, the new name of a test, and the like.
        file: where the test is, relative to the project; "": not known.
        line: in `file`, counted from 1; 0: not known.
        seconds: that its rounds took, without the start of their processes.
        reference: of each round the seconds of each part of the pinned workload that was timed among its
            pairs; none without it.
        tokens: that a call of base handles, and one of head; 0: the work does not say.
    """

    __test__ = False  # for pytest, which takes the name for a test

    nodeid: str
    status: Status = "measured"
    trials: dict[str, TrialResult] = field(default_factory=dict)
    detail: str = ""
    file: str = ""
    line: int = 0
    seconds: float = 0.0
    reference: tuple[tuple[float, ...], ...] = ()
    tokens: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        check_choice("status", self.status, get_args(Status))
        require(
            bool(self.trials) == (self.status == "measured"),
            "trials",
            sorted(self.trials),
            "one or more where the status is 'measured', else none",
        )

    @property
    def verdict(self) -> Verdict:
        """The worst of its metrics; INCONCLUSIVE where it was not measured.

        IMPROVED takes one metric that is, and none that is INCONCLUSIVE or REGRESSED.
        """
        verdicts = {trial.decision.verdict for trial in self.trials.values()}
        for verdict in (Verdict.REGRESSED, Verdict.INCONCLUSIVE, Verdict.IMPROVED, Verdict.PASS):
            if verdict in verdicts:
                return verdict
        return Verdict.INCONCLUSIVE

    @property
    def tokens_per_second(self) -> tuple[float, float] | None:
        """Of base and of head, by the time of a call, whose verdict is theirs.

        None where a side does not say how many tokens it handles, or the time is not judged.
        """
        time = self.trials.get("time")
        levels = None if time is None else time.levels
        if levels is None or not all(self.tokens):
            return None
        return self.tokens[0] / levels[0], self.tokens[1] / levels[1]

    def outcome(self, missing: Missing) -> Outcome:
        """What it is to the run.

        A test that is broken on head has failed. One that is broken on base has nothing to be compared with.
        """
        match self.status:
            case "measured":
                return _OUTCOMES[self.verdict]
            case "crashed on head" | "hung on head":
                return "failed"
            case "set-up error":
                return "error"
            case "crashed on base" | "hung on base" | "skipped on head" | "not begun" | "not measured":
                return "inconclusive"
            case "missing on head":
                return "warned"
            case "skipped" | "unused":
                return "passed"
            case "missing on base":
                return "failed" if missing == "fail" else "warned" if missing == "warn" else "passed"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rates = self.tokens_per_second
        return {
            **asdict(self),
            "trials": {metric: trial.to_dict() for metric, trial in self.trials.items()},
            "reference": [list(each) for each in self.reference],
            "tokens": list(self.tokens),
            "tokens_per_second": rates and list(rates),
            "verdict": str(self.verdict),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """What `to_dict` gave, also where it went through JSON."""
        kept = {key: value for key, value in values.items() if key not in ("verdict", "tokens_per_second")}
        trials = {metric: TrialResult.from_dict(trial) for metric, trial in values["trials"].items()}
        reference = tuple(tuple(each) for each in values["reference"])
        tokens = tuple(values.get("tokens", (0, 0)))  # older files have none
        return cls(**{**kept, "trials": trials, "reference": reference, "tokens": tokens})


@dataclass(frozen=True)
class GateResult:
    """A comparison of head with base.

    Attributes:
        base: the name of the old side: a revision, a folder, a wheel.
        head: the name of the new one.
        tests: all of them, in their order.
        seconds: that the comparison took, the start of processes and what came before (`spent`) included.
        rounds: that were made.
        missing: what a test that is not on base is: "fail" a failure, "warn" a warning, "create" no matter.
        environment: of the machine and its software (`stackwise.support.device.fingerprint`).
        seed: of the random orders.
        order_bias: what being first in a pair was worth: 0.01 means 1 % faster; None: not known. The turns
            take it out; it tells of a machine on which order matters.
        balance: the share of pairs in which base came first; 0.5 is balanced. None: not known.
        notes: what a reader has to know beside.
        suite: regression of all tests together (`stackwise.gate.suite`); None: none was found.
    """

    base: str
    head: str
    tests: tuple[TestResult, ...]
    seconds: float = 0.0
    rounds: int = 0
    missing: Missing = "warn"
    environment: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    order_bias: float | None = None
    balance: float | None = None
    notes: tuple[str, ...] = ()
    suite: TestResult | None = None

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, get_args(Missing))
        names = [test.nodeid for test in self.tests]
        require(len(names) == len(set(names)), "tests", names, "tests of different names")

    @property
    def findings(self) -> tuple[TestResult, ...]:
        """All tests, and the suite at the end if it is slower as a whole."""
        return self.tests if self.suite is None else (*self.tests, self.suite)

    @property
    def compared(self) -> bool:
        """Whether anything was: a metric of a test has an estimate, or new tests are to pass ("create").

        Nothing was where all tests are skipped or broken, say, or no saved run is of the head's machine.
        """
        if self.missing == "create" and any(test.status == "missing on base" for test in self.tests):
            return True
        trials = [trial for test in self.tests for trial in test.trials.values()]
        return any(math.isfinite(trial.decision.estimate) for trial in trials)

    @property
    def outcome(self) -> Outcome:
        """The worst of its findings; "inconclusive" at best if nothing was compared."""
        outcomes = [test.outcome(self.missing) for test in self.findings]
        if not self.compared:
            outcomes.append("inconclusive")
        return max(outcomes, key=_ORDER.index)

    @property
    def verdict(self) -> Headline:
        """Verdict of the run: that of its worst finding.

        REGRESSED takes a metric that got worse. A test that crashes on head is FAILED, and one that could not
        be set up an ERROR.
        """
        verdicts = {test.verdict for test in self.findings}
        match self.outcome:
            case "failed":
                return "REGRESSED" if Verdict.REGRESSED in verdicts else "FAILED"
            case "error":
                return "ERROR"
            case "inconclusive":
                return "INCONCLUSIVE"
        return "IMPROVED" if Verdict.IMPROVED in verdicts else "PASS"

    @property
    def exit_code(self) -> int:
        """Exit code of the run: 0 passed, 1 failed, 4 set-up error, 5 nothing compared, 7 undecided."""
        undecided = EXIT_INCONCLUSIVE if self.compared else EXIT_NOTHING
        return {"failed": 1, "error": EXIT_SETUP, "inconclusive": undecided}.get(self.outcome, 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `version` is that of their form."""
        return {
            "version": _VERSION,
            **asdict(self),
            "tests": [test.to_dict() for test in self.tests],
            "notes": list(self.notes),
            "suite": self.suite and self.suite.to_dict(),
            "order_bias": _finite(self.order_bias),
            "balance": _finite(self.balance),
            "verdict": self.verdict,
            "outcome": self.outcome,
            "exit_code": self.exit_code,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """What `to_dict` gave, also where it went through JSON.

        Raises:
            ValueError: the values have another form.
        """
        require(values.get("version") == _VERSION, "version", values.get("version"), str(_VERSION))
        derived = {"version", "verdict", "outcome", "exit_code"}
        kept = {key: value for key, value in values.items() if key not in derived}
        tests = tuple(TestResult.from_dict(test) for test in values["tests"])
        suite = values.get("suite") and TestResult.from_dict(values["suite"])  # older files have none
        return cls(**{**kept, "tests": tests, "notes": tuple(values["notes"]), "suite": suite})


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _share(logarithm: float) -> float | None:
    return math.expm1(logarithm) if math.isfinite(logarithm) else None

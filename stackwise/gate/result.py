"""GateResult: complete result of the comparison of two revisions, as data."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self, get_args

from stackwise.gate.verdict import WORST_FIRST, Decision, Verdict
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
# Outcomes from best to worst. The worst outcome of its findings is that of a run.
_ORDER: tuple[Outcome, ...] = get_args(Outcome)
_OUTCOMES: dict[Verdict, Outcome] = {
    Verdict.PASS: "passed",
    Verdict.IMPROVED: "passed",
    Verdict.INCONCLUSIVE: "inconclusive",
    Verdict.REGRESSED: "failed",
}


@dataclass(frozen=True)
class TrialResult:
    """Result of one metric of one test.

    Attributes:
        decision: decision of the trial.
        unit: unit of the levels: "s" or "B".
        tolerance: applied tolerance, as a share of the base's cost. A floor may have raised it.
        minimum_effect: applied minimum effect, as a share of the base's cost.
        differences: log(head / base) of each round.
        base: cost of base in each round, in `unit`.
        head: cost of head in each round, in `unit`.
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
        """Costs of base and head: base is the median of the rounds, head is base changed by the estimate.

        None if base or head has no rounds. The median of head's own rounds would contradict the estimate:
        sides are compared within rounds, and the machine is not equally fast in all of them.
        """
        if not self.base or not self.head:
            return None
        base, estimate = statistics.median(self.base), self.decision.estimate
        return base, base * (1 + estimate) if math.isfinite(estimate) else statistics.median(self.head)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        rows = {key: list(getattr(self, key)) for key in ("differences", "base", "head")}
        return {**asdict(self), **rows, "decision": self.decision.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Create the result from the values of `to_dict`, also after a round trip through JSON."""
        rows = {key: tuple(values[key]) for key in ("differences", "base", "head")}
        return cls(**{**values, **rows, "decision": Decision.from_dict(values["decision"])})


@dataclass(frozen=True)
class TestResult:
    """Result of one test.

    Attributes:
        nodeid: node ID of the test in pytest, or another unique name.
        status: "measured", or the reason why the test was not measured, with the side. "not begun": the time
            limit was too short. "not measured": a side did not run the tests in their order, the system
            killed a side, or only one side called `benchmark` or `throughput`. "unused": neither side called
            them. "set-up error": the test cannot be measured until the test, the trees or the environment are
            changed; `detail` has the remedy.
        trials: results by metric ("time", "memory", "ttft", "tpot"); empty if the test was not measured.
        detail: more information, such as the last output of a side before a crash, or the new name of a test.
        file: path of the test, relative to the project; "": unknown.
        line: line of the test in `file`, from 1; 0: unknown.
        seconds: duration of its rounds, without the start of their processes.
        reference: seconds of each part of the pinned workload in each round, timed between the pairs; empty
            without a reference.
        tokens: tokens per call of base and of head; 0: unknown.
    """

    __test__ = False  # otherwise pytest treats the class as a test

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
        """Worst verdict of its metrics; INCONCLUSIVE if the test was not measured.

        IMPROVED requires an improved metric, and no metric that is INCONCLUSIVE or REGRESSED.
        """
        verdicts = (trial.decision.verdict for trial in self.trials.values())
        return min(verdicts, key=WORST_FIRST.index, default=Verdict.INCONCLUSIVE)

    @property
    def tokens_per_second(self) -> tuple[float, float] | None:
        """Tokens per second of base and of head, from the time of a call. The verdict of the time applies.

        None if a side does not report its number of tokens, or if the time is not judged.
        """
        time = self.trials.get("time")
        levels = None if time is None else time.levels
        if levels is None or not all(self.tokens):
            return None
        return self.tokens[0] / levels[0], self.tokens[1] / levels[1]

    def outcome(self, missing: Missing) -> Outcome:
        """Return the outcome of the test for the run.

        A test that is broken on head fails the run. A test that is broken on base cannot be compared.
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
        """Return plain values, for JSON."""
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
        """Create the result from the values of `to_dict`, also after a round trip through JSON."""
        kept = {key: value for key, value in values.items() if key not in ("verdict", "tokens_per_second")}
        trials = {metric: TrialResult.from_dict(trial) for metric, trial in values["trials"].items()}
        reference = tuple(tuple(each) for each in values["reference"])
        return cls(**{**kept, "trials": trials, "reference": reference, "tokens": tuple(values["tokens"])})


@dataclass(frozen=True)
class GateResult:
    """Comparison of head with base.

    Attributes:
        base: name of the old side: a revision, a folder or a wheel.
        head: name of the new side.
        tests: results of all tests, in their order.
        seconds: duration of the comparison, including the start of processes and the time before it
            (`spent`).
        rounds: number of rounds.
        missing: treatment of a test that base does not have: "fail" (a failure), "warn" (a warning) or
            "create" (a pass).
        environment: description of the machine and its software (`stackwise.support.device.fingerprint`).
        seed: seed of the random orders.
        order_bias: effect of being first in a pair: 0.01 means 1 % faster; None: unknown. Alternating turns
            cancel it. A large value shows that the order matters on this machine.
        balance: share of the pairs with base first; 0.5 is balanced. None: unknown.
        notes: notes for the reader.
        suite: regression of all tests together (`stackwise.gate.suite`); None: no such regression.
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
        """All tests. If the suite is slower as a whole, it is the last finding."""
        return self.tests if self.suite is None else (*self.tests, self.suite)

    @property
    def compared(self) -> bool:
        """True if a metric of a test has an estimate, or if new tests are to pass ("create").

        False, for example, if all tests are skipped or broken, or if no saved run is from the head's machine.
        """
        if self.missing == "create" and any(test.status == "missing on base" for test in self.tests):
            return True
        trials = [trial for test in self.tests for trial in test.trials.values()]
        return any(math.isfinite(trial.decision.estimate) for trial in trials)

    @property
    def outcome(self) -> Outcome:
        """Worst outcome of its findings; at best "inconclusive" if no metric was compared."""
        outcomes = [test.outcome(self.missing) for test in self.findings]
        if not self.compared:
            outcomes.append("inconclusive")
        return max(outcomes, key=_ORDER.index)

    @property
    def verdict(self) -> Headline:
        """Verdict of the run: that of its worst finding.

        REGRESSED requires a regressed metric. A test that crashes on head is FAILED, and a test with a set-up
        error is an ERROR.
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
        """Exit code of the run: 0 passed, 1 failed, 4 set-up error, 5 without a comparison, 7 undecided."""
        undecided = EXIT_INCONCLUSIVE if self.compared else EXIT_NOTHING
        return {"failed": 1, "error": EXIT_SETUP, "inconclusive": undecided}.get(self.outcome, 0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON. `version` is the version of the format."""
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
        """Create the result from the values of `to_dict`, also after a round trip through JSON.

        Raises:
            ValueError: the values have another version of the format.
        """
        require(values.get("version") == _VERSION, "version", values.get("version"), str(_VERSION))
        derived = {"version", "verdict", "outcome", "exit_code"}
        kept = {key: value for key, value in values.items() if key not in derived}
        tests = tuple(TestResult.from_dict(test) for test in values["tests"])
        suite = values["suite"] and TestResult.from_dict(values["suite"])
        return cls(**{**kept, "tests": tests, "notes": tuple(values["notes"]), "suite": suite})


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

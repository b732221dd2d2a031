"""OpenTest: a test with its trials, from its first round until its decision."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from stackwise.gate.limit import Limit, Limits
from stackwise.gate.result import Status, TestResult, TrialResult
from stackwise.gate.round import SIDES, Ended, Paired
from stackwise.gate.sequential import Rule
from stackwise.gate.trial import Trial
from stackwise.gate.verdict import Verdict

__all__ = ["OpenTest"]

# Errors of a test, or of the import of its file, if the base lacks a name that it uses.
_LACKING = ("ImportError", "ModuleNotFoundError", "AttributeError", "NameError", "TypeError", "fixture ")
_TIME = "the time is up"
_UNITS = {"time": "s", "ttft": "s", "tpot": "s", "memory": "B"}


@dataclass
class OpenTest:
    """Test during its measurement.

    Attributes:
        nodeid: node ID of the test in pytest.
        limits: limits of its metrics.
        asked: metrics that the test's own marker names. Such a metric is INCONCLUSIVE if it has a limit and
            cannot be measured.
        trials: trials of the metrics of the first round, by metric.
        base: cost of base in each round, by metric, in the metric's unit.
        head: cost of head in each round, by metric, in the metric's unit.
        ended: outcome if the test could not be measured; None: no such outcome so far.
        own: True if both sides have imported code of their trees for the test.
        mixed: reason why the comparison is not valid; "" if no reason is known.
        watched: True if the sides have reported each file that they opened, in at least one round.
        disturbed: True if the times of a round were discarded because these reports slowed it down.
        seconds: duration of its rounds.
        round_seconds: duration of its last round.
        beside_seconds: part of `round_seconds` without measurement.
        reference: median seconds of each part of a pinned workload, per round; [] without a reference.
        tokens: tokens per call of base and of head; 0: unknown.
        order: for each round, the order of its pairs (True: head first) and their log(head / base) of the
            time.
        whole_file: True if the earlier tests of its file have to run before it.
        warnings: RuntimeWarnings, with the sides of each.
    """

    nodeid: str
    limits: Limits
    asked: tuple[str, ...] = ()
    trials: dict[str, Trial] = field(default_factory=dict)
    base: dict[str, list[float]] = field(default_factory=dict)
    head: dict[str, list[float]] = field(default_factory=dict)
    ended: Ended | None = None
    own: bool = False
    mixed: str = ""
    watched: bool = False
    disturbed: bool = False
    seconds: float = 0.0
    round_seconds: float = 0.0
    beside_seconds: float = 0.0
    reference: list[tuple[float, ...]] = field(default_factory=list)
    tokens: tuple[int, int] = (0, 0)
    order: list[tuple[tuple[bool, ...], tuple[float, ...]]] = field(default_factory=list)
    whole_file: bool = False
    warnings: dict[str, set[str]] = field(default_factory=dict)

    @property
    def begun(self) -> bool:
        """True if any round had a result for the test."""
        return self.ended is not None or self.disturbed or bool(self.order)

    @property
    def open(self) -> bool:
        """True if the test needs more rounds."""
        if self.ended is not None or self.mixed:
            return False
        return not self.order or any(not trial.decided for trial in self.trials.values())

    @property
    def confirming(self) -> bool:
        """True if the test was flagged and its fresh rounds are not decided yet."""
        return self.open and any(trial.confirming and not trial.decided for trial in self.trials.values())

    @property
    def wants_memory(self) -> bool:
        """True if the memory of its calls is not decided yet."""
        if not self.order:
            return self.limits.memory is not None
        return "memory" in self.trials and not self.trials["memory"].decided

    @property
    def n_trials(self) -> int:
        """Number of trials with rounds. Before the first round: the maximum number of trials."""
        if self.order or self.ended is not None:
            return sum(bool(trial.differences) for trial in self.trials.values())
        return sum(limit is not None for limit in self.limits.all)

    def add(self, found: Paired | Ended, rule: Rule) -> None:
        """Add the result of a round.

        Args:
            found: result of this test.
            rule: rule of the decisions.
        """
        for role, texts in found.warnings.items():
            for text in texts:
                self.warnings.setdefault(text, set()).add(role)
        if isinstance(found, Ended):
            self.ended = found
            return
        self.watched = self.watched or found.watched
        self.round_seconds, self.beside_seconds = found.seconds, found.seconds - found.sampled
        if found.disturbed and not found.mixed:
            self.disturbed = True
            return
        if not self.order:
            self._begin_trials((*found.differences, *found.lacking, *self.asked), rule)
        self.seconds += found.seconds
        self.own = self.own or found.own
        self.whole_file = self.whole_file or found.whole_file
        self.mixed = self.mixed or found.mixed
        self.tokens = found.tokens
        if found.reference:
            self.reference.append(found.reference)
        for metric, trial in self.trials.items():
            if trial.decided:
                continue
            if metric not in found.differences:
                # The metric might be missing in every later round too.
                trial.conclude(f"round {len(self.order) + 1} had no {metric}{_why(metric, found)}")
                continue
            self.base.setdefault(metric, []).append(found.base[metric])
            self.head.setdefault(metric, []).append(found.head[metric])
            trial.add(found.differences[metric], found.base[metric])
        # Last: after Ctrl-C in the first round, the test is then treated as not begun.
        self.order.append((found.head_first, found.logs))

    def _begin_trials(self, metrics: Iterable[str], rule: Rule) -> None:
        limits = {metric: self.limits.of(metric) for metric in dict.fromkeys(metrics)}
        self.trials = {metric: Trial(limit, rule) for metric, limit in limits.items() if limit is not None}

    def skip(self, reason: str) -> None:
        """Mark the test as skipped, because its measurement compares nothing."""
        self.ended = Ended(dict.fromkeys(SIDES, "skipped"), dict.fromkeys(SIDES, reason))
        self.trials = {}

    def result(self, file: str = "", line: int = 0, *, interrupted: bool = False) -> TestResult:
        """Return the result. Open trials are decided from the rounds so far.

        Args:
            file: file of the test.
            line: line of the test in `file`.
            interrupted: True if the run was interrupted; False: the time limit was reached.
        """
        where: dict[str, Any] = {"file": file, "line": line, "seconds": self.seconds}
        if self.ended is None and not self.order:
            detail = "interrupted" if interrupted else "the time was not enough for all tests"
            return TestResult(self.nodeid, "not begun", {}, detail, **where)
        reason, detail = "interrupted" if interrupted else _TIME, ""
        if self.ended is not None:
            status, detail = _status(self.ended)
            # After measured rounds, the same failure on both sides is no change of the head.
            on_both = self.ended.how.get("base") == self.ended.how.get("head")
            broken = status in ("crashed on head", "hung on head") and not on_both
            # Earlier results are valid unless the head or the set-up is broken.
            if not self.trials or broken or status == "set-up error":
                return TestResult(self.nodeid, status, {}, detail, **where)
            how = f"{self.ended.how['head']} on both sides" if on_both else status
            reason = f"it was {how} in round {len(self.order) + 1}: {detail}"
        if not self.trials:
            detail = "its limits leave nothing to be judged of what was measured"
            return TestResult(self.nodeid, "skipped", {}, detail, **where)
        trials = {metric: self._trial(metric, trial, reason) for metric, trial in self.trials.items()}
        more: dict[str, Any] = {"reference": tuple(self.reference), "tokens": self.tokens}
        return TestResult(self.nodeid, "measured", trials, detail, **more, **where)

    def _trial(self, metric: str, trial: Trial, reason: str) -> TrialResult:
        decision = trial.conclude(reason, together=reason == _TIME)
        limit: Limit = trial.limit
        if self.mixed:
            # The levels are of neither revision.
            decision = replace(decision, verdict=Verdict.INCONCLUSIVE, confirmed=False, reason=self.mixed)
        tolerance, least = map(math.expm1, limit.at(trial.base_level if trial.differences else None))
        return TrialResult(
            decision,
            _UNITS[metric],
            tolerance,
            least,
            trial.differences,
            () if self.mixed else tuple(self.base.get(metric, ())),
            () if self.mixed else tuple(self.head.get(metric, ())),
        )


def _why(metric: str, found: Paired) -> str:
    """Return the reason why a round lacks a metric, as the end of a sentence."""
    if metric in found.lacking:
        return f" on {found.lacking[metric]}"
    return ", which is not read of a single call" if metric == "memory" else ""


def _status(ended: Ended) -> tuple[Status, str]:
    """Return status and detail of a test that was not measured. Problems of the head take precedence."""
    if ended.how == dict.fromkeys(SIDES, "not measured"):
        return "unused", "it requests benchmark or throughput and calls neither"
    for role in ("head", "base"):
        how, detail = ended.how.get(role), ended.detail.get(role, "")
        match role, how:
            case _, "refused":
                return "set-up error", detail
            case _, "not measured" | "out of order" | "killed":
                return "not measured", f"{role}: {detail}"
            case "head", "skipped" if "base" not in ended.how:
                return "skipped on head", f"{detail}; the base runs it"
            case "head", "skipped":
                return "skipped", detail
            case "head", "missing":
                # The user's run has collected the test.
                return "crashed on head", f"missing in its tree: {detail}"
            case "head", "hung":
                return "hung on head", detail
            case "head", str():
                return "crashed on head", detail
            case "base", "skipped" | "missing":
                return "missing on base", f"{how}: {detail}"
            case "base", "failed" | "not collected" if detail.startswith(_LACKING):
                return "missing on base", f"{how}: {detail}"
            case "base", "hung":
                return "hung on base", detail
            case "base", str():
                return "crashed on base", detail
    raise AssertionError("a test that was not measured was neither on base nor on head")

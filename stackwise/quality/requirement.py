"""Requirement: limits for the quality of a model at a task."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from stackwise.quality.paired import PairedDifference
from stackwise.quality.tasks import TaskResult
from stackwise.support.arguments import check_number, require

__all__ = ["Judgement", "Requirement"]

Verdict = Literal["met", "missed", "inconclusive"]


@dataclass(frozen=True)
class Judgement:
    """Result of a requirement.

    Attributes:
        verdict: "met", "missed", or "inconclusive" if there are too few examples.
        reason: reason in one line.
        metric: metric of the task.
        value: value of the model.
        examples: number of examples.
        difference: difference to the baseline. None: no baseline.
    """

    verdict: Verdict
    reason: str
    metric: str
    value: float
    examples: int
    difference: PairedDifference | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON. Non-finite numbers are strings."""
        value = self.value if math.isfinite(self.value) else str(self.value)
        return vars(self) | {"value": value, "difference": self.difference and self.difference.to_dict()}


@dataclass(frozen=True)
class Requirement:
    """Limits for the quality of a model.

    Attributes:
        at_least: minimum share of correct answers, or of another metric that is better if it is higher.
        at_most: maximum bits per byte, or maximum of another cost.
        within_of_baseline: maximum loss of quality compared with the baseline, as a share or in bits per
            byte. It is missed if the model is significantly worse by more, and met if it is significantly
            not. Otherwise it is inconclusive. Both models answer the same examples, so a small set of
            examples does not make the result unstable.
        level: confidence level of the interval of the difference.

    Raises:
        ValueError: no limits, or a limit out of range.
    """

    at_least: float | None = None
    at_most: float | None = None
    within_of_baseline: float | None = None
    level: float = 0.95

    def __post_init__(self) -> None:
        asked = {key: getattr(self, key) for key in ("at_least", "at_most", "within_of_baseline")}
        require(
            any(value is not None for value in asked.values()), "requirement", asked, "one of them or more"
        )
        if self.at_least is not None:
            check_number("at_least", self.at_least, "a share, 0 to 1", lambda value: 0 <= value <= 1)
        for key in ("at_most", "within_of_baseline"):
            if asked[key] is not None:
                check_number(key, asked[key], "a number >= 0", lambda value: value >= 0)
        check_number("level", self.level, "a number above 0 and below 1", lambda value: 0 < value < 1)

    def check(self, *, less_is_better: bool) -> None:
        """Refuse a limit that does not apply to the metric of a task, before the model is evaluated.

        Args:
            less_is_better: attribute of the `Task`.

        Raises:
            ValueError: a limit does not apply. The message names the limit to use.
        """
        if less_is_better:
            require(
                self.at_least is None,
                "at_least",
                self.at_least,
                "none for a cost, such as bits per byte: use at_most",
            )
        else:
            require(self.at_most is None, "at_most", self.at_most, "none for right answers: use at_least")

    def judge(self, result: TaskResult, baseline: TaskResult | None = None) -> Judgement:
        """Compare a result with the limits.

        Args:
            result: result of the model.
            baseline: result of the baseline at the same task, for `within_of_baseline`.

        Raises:
            ValueError: a limit does not apply to the task's metric, or the baseline is missing, has other
                examples, or has no finite value.
        """
        metric, value = result.metric, result.value
        self.check(less_is_better=result.less_is_better)
        if baseline is not None:
            base = baseline.value
            require(math.isfinite(base), f"{metric} of the baseline", base, "a finite number")
        difference = None if baseline is None else result.difference(baseline, level=self.level)
        found: list[tuple[Verdict, str]] = []
        if not math.isfinite(value):  # more examples would not change this
            found.append(("missed", f"{metric} is {value}, which is no finite number"))
        for limit, sign, word in ((self.at_least, 1, "at least"), (self.at_most, -1, "at most")):
            if limit is not None:
                met = sign * (value - limit) >= 0
                found.append(("met" if met else "missed", f"{metric} {value:.4f}, {word} {limit:g} is asked"))
        if self.within_of_baseline is not None:
            require(difference is not None, "baseline", None, "a model, for within_of_baseline")
            assert difference is not None
            found.append(self._beside(difference, metric, result.less_is_better))
        verdict, reason = max(found, key=lambda each: ("met", "inconclusive", "missed").index(each[0]))
        return Judgement(verdict, reason, metric, value, len(result.examples), difference)

    def _beside(self, difference: PairedDifference, metric: str, less_is_better: bool) -> tuple[Verdict, str]:
        assert self.within_of_baseline is not None
        verdict: Verdict
        match difference.standing(self.within_of_baseline, less_is_better=less_is_better):
            case "not worse":
                verdict, said = "met", "surely not worse by more than"
            case "worse":
                verdict, said = "missed", "surely worse by more than"
            case "open":
                verdict, said = "inconclusive", "too few examples to tell whether it is worse by more than"
        return verdict, (
            f"{metric} {difference} to the baseline on {difference.examples} examples: {said} "
            f"{self.within_of_baseline:g}"
        )

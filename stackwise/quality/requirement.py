"""Requirement: what is asked of a model at a task, and whether it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from stackwise.quality.comparison import paired_difference
from stackwise.quality.paired import PairedDifference
from stackwise.quality.perplexity import PerplexityResult
from stackwise.quality.task import TaskResult
from stackwise.support.arguments import check_number, require

__all__ = ["Judgement", "Requirement"]

Verdict = Literal["met", "missed", "inconclusive"]


@dataclass(frozen=True)
class Judgement:
    """What came of a requirement.

    Attributes:
        verdict: "met", "missed", or "inconclusive": too few examples to tell.
        reason: in a line.
        metric: of the task.
        value: of the model.
        examples: how many there were.
        difference: to the baseline; None: there was none.
    """

    verdict: Verdict
    reason: str
    metric: str
    value: float
    examples: int
    difference: PairedDifference | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what is not finite is a text."""
        value = self.value if math.isfinite(self.value) else str(self.value)
        return vars(self) | {"value": value, "difference": self.difference and self.difference.to_dict()}


@dataclass(frozen=True)
class Requirement:
    """What is asked of a model.

    Attributes:
        at_least: of a share of right answers.
        at_most: of bits per byte.
        within_of_baseline: how much worse than the baseline it may be, in the task's figure: a share or bits
            per byte. It is missed where the model is surely worse by more, met where it surely is not, and
            else inconclusive: both models answer the same examples, so that few do not make it flap.
        level: that the interval of the difference covers.

    Raises:
        ValueError: nothing is asked, or numbers out of range.
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

    def check(self, *, is_cost: bool) -> None:
        """Refuse a limit that the figure of a task has not, before anything is asked of a model.

        Args:
            is_cost: as of `Task`.

        Raises:
            ValueError: naming the limit, and the one to use.
        """
        if is_cost:
            require(self.at_least is None, "at_least", self.at_least, "none of bits per byte: use at_most")
        else:
            require(self.at_most is None, "at_most", self.at_most, "none of right answers: use at_least")

    def judge(self, result: TaskResult, baseline: TaskResult | None = None) -> Judgement:
        """Hold a result against it.

        Args:
            result: of the model.
            baseline: of the same task, by the model that `within_of_baseline` is about.

        Raises:
            ValueError: a limit that the task's figure has not, or a baseline that is missing, of other
                examples, or itself without a finite figure.
        """
        is_cost = isinstance(result, PerplexityResult)
        metric, value, examples = _figure(result)
        self.check(is_cost=is_cost)
        if baseline is not None:
            base = _figure(baseline)[1]
            require(math.isfinite(base), f"{metric} of the baseline", base, "a finite number")
        difference = None if baseline is None else paired_difference(result, baseline, level=self.level)
        found: list[tuple[Verdict, str]] = []
        if not math.isfinite(value):  # more examples would not help
            found.append(("missed", f"{metric} is {value}, which is no finite number"))
        for limit, sign, word in ((self.at_least, 1, "at least"), (self.at_most, -1, "at most")):
            if limit is not None:
                met = sign * (value - limit) >= 0
                found.append(("met" if met else "missed", f"{metric} {value:.4f}, {word} {limit:g} is asked"))
        if self.within_of_baseline is not None:
            require(difference is not None, "baseline", None, "a model, for within_of_baseline")
            assert difference is not None
            found.append(self._beside(difference, metric, is_cost))
        verdict, reason = max(found, key=lambda each: ("met", "inconclusive", "missed").index(each[0]))
        return Judgement(verdict, reason, metric, value, examples, difference)

    def _beside(self, difference: PairedDifference, metric: str, is_cost: bool) -> tuple[Verdict, str]:
        assert self.within_of_baseline is not None
        verdict: Verdict
        match difference.standing(self.within_of_baseline, less_is_better=is_cost):
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


def _figure(result: TaskResult) -> tuple[str, float, int]:
    """What it is called, what it is, and of how many examples."""
    if isinstance(result, PerplexityResult):
        return "bits_per_byte", result.bits_per_byte, len(result.texts)
    return result.metric, result.figure.value, result.figure.count

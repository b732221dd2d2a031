"""CheckResult: result of a check, as data."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypedDict, Unpack

import torch

from stackwise.support.random_state import seeded

__all__ = ["CheckResult", "Examined", "Status", "listed"]

Status = Literal[
    "passed", "failed", "warned", "accepted warning", "not applicable", "expected failure", "error"
]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check.

    Attributes:
        check: name of the check.
        model: name of the model or training step.
        status: "passed"; "failed" (a defect); "warned" (a probable defect that some correct models have);
            "accepted warning" and "expected failure" (declared by the user, with a reason);
            "not applicable"; "error" (the check could not finish).
        value: measured value, or None.
        limit: largest value that passes, or None.
        where: the place: a position, a parameter or a module.
        meaning: the defect, in one sentence.
        advice: likely causes. For a warning: first the condition under which the model is correct.
        seconds: duration of the check, or None.
        combined: for a check of a variation: name of another one -> number of compositions with both.
    """

    check: str
    model: str
    status: Status
    value: float | None = None
    limit: float | None = None
    where: str = ""
    meaning: str = ""
    advice: str = ""
    seconds: float | None = field(default=None, compare=False)
    combined: dict[str, int] | None = field(default=None, compare=False)

    @property
    def ok(self) -> bool:
        """False if the status is "failed" or "error"."""
        return self.status not in ("failed", "error")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.check} {self.status}"]
        if self.value is not None:
            lines[0] += f": measured {self.value:.3g}"
            lines[0] += f", limit {self.limit:.3g}" if self.limit is not None else ""
        lines += [f"  {text}" for text in (self.meaning, self.where, self.advice) if text]
        return "\n".join(lines)


class _Text(TypedDict, total=False):
    """Texts of a result, all optional."""

    where: str
    meaning: str
    advice: str


@dataclass(frozen=True)
class Examined:
    """Base of the objects that checks examine: a description, and the ways to build a result.

    Attributes:
        spec: description of the object.
        device: device of its model.
        seed: seed of weights, inputs and dropout.
    """

    spec: Any
    device: torch.device
    seed: int = 0

    @property
    def name(self) -> str:
        """Name of the object in results."""
        name: str = self.spec.name
        return name

    def fixed_randomness(self) -> AbstractContextManager[None]:
        """Return a context in which random choices start from the seed. It restores random states."""
        return seeded(self.seed, self.device)

    def passed(
        self, value: float | None = None, limit: float | None = None, **text: Unpack[_Text]
    ) -> CheckResult:
        """Return a result without a finding."""
        return CheckResult("", self.name, "passed", value, limit, **text)

    def failed(
        self, value: float | None = None, limit: float | None = None, **text: Unpack[_Text]
    ) -> CheckResult:
        """Return a result that shows a defect."""
        return CheckResult("", self.name, "failed", value, limit, **text)

    def warned(
        self,
        value: float | None = None,
        limit: float | None = None,
        *,
        meaning: str,
        correct_if: str,
        advice: str,
        where: str = "",
    ) -> CheckResult:
        """Return a result that shows a probable defect, which some correct models have on purpose.

        Args:
            value: measured value.
            limit: largest value that passes.
            meaning: the defect, as a sentence.
            correct_if: condition under which the model is correct, as the end of "This is correct if ...".
            advice: action for all other models, as a sentence that starts with an imperative.
            where: the place: a position, a parameter or a module.
        """
        advice = f"This is correct if {correct_if}. Otherwise, {advice[0].lower()}{advice[1:]}"
        return CheckResult("", self.name, "warned", value, limit, where, meaning, advice)

    def failed_unless(
        self,
        correct_if: str | None,
        value: float | None = None,
        limit: float | None = None,
        *,
        meaning: str,
        advice: str,
        where: str = "",
    ) -> CheckResult:
        """Return a failure, or a warning if the model is correct under a condition.

        See `warned` for the arguments.
        """
        if correct_if is None:
            return self.failed(value, limit, meaning=meaning, advice=advice, where=where)
        return self.warned(value, limit, meaning=meaning, correct_if=correct_if, advice=advice, where=where)

    def at_most(self, value: float, limit: float, **text: Unpack[_Text]) -> CheckResult:
        """Return "passed" if `value` is at most `limit`, otherwise "failed" with `text`."""
        return self.passed(value, limit) if value <= limit else self.failed(value, limit, **text)

    def not_applicable(self, reason: str) -> CheckResult:
        """Return the result of a check that does not apply to this model."""
        return CheckResult("", self.name, "not applicable", meaning=reason)


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return the first names, joined by commas, and the number of the remaining ones."""
    names = list(names)
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")

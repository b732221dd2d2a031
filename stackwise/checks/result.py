"""CheckResult: the answer of a check, as data.

Statuses are "passed", "failed", "warned", "not applicable", "expected failure" and "error".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["CheckResult", "Examined", "Status", "listed"]

Status = Literal["passed", "failed", "warned", "not applicable", "expected failure", "error"]


@dataclass(frozen=True)
class CheckResult:
    """The answer of one check.

    Attributes:
        check: the check's name.
        model: the model's name.
        status: "passed", "failed", "warned" (unusual, to be looked at), "not applicable",
            "expected failure" (failed, as was declared), "error" (the check could not finish).
        value: what was measured, or None.
        limit: the largest value that passes, or None.
        where: the place: a position, a parameter, a module.
        meaning: what the value says, in one sentence.
        advice: the likely cause and what to look at.
    """

    check: str
    model: str
    status: Status
    value: float | None = None
    limit: float | None = None
    where: str = ""
    meaning: str = ""
    advice: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing needs to be mended: all but "failed" and "error"."""
        return self.status not in ("failed", "error")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.check} {self.status}"]
        if self.value is not None:
            lines[0] += f": measured {self.value:.3g}"
            lines[0] += f", limit {self.limit:.3g}" if self.limit is not None else ""
        lines += [f"  {text}" for text in (self.where, self.meaning, self.advice) if text]
        return "\n".join(lines)


class Examined:
    """Whatever checks are asked of: the ways to answer one."""

    @property
    def name(self) -> str:
        """Of what is examined, in results."""
        raise NotImplementedError

    def passed(self, value: float | None = None, limit: float | None = None, **text: str) -> CheckResult:
        """A result that is as it should be."""
        return CheckResult("", self.name, "passed", value, limit, **text)

    def failed(self, value: float | None = None, limit: float | None = None, **text: str) -> CheckResult:
        """A result that shows a defect."""
        return CheckResult("", self.name, "failed", value, limit, **text)

    def warned(self, value: float | None = None, limit: float | None = None, **text: str) -> CheckResult:
        """A result that is unusual, but not wrong for certain."""
        return CheckResult("", self.name, "warned", value, limit, **text)

    def at_most(self, value: float, limit: float, **text: str) -> CheckResult:
        """Passed where `value` is at most `limit`; else failed, and `text` says how."""
        return self.passed(value, limit) if value <= limit else self.failed(value, limit, **text)

    def not_applicable(self, reason: str) -> CheckResult:
        """The question makes no sense for this model."""
        return CheckResult("", self.name, "not applicable", meaning=reason)


def listed(names: Iterable[str], most: int = 3) -> str:
    """The first names, and how many there are beside."""
    names = list(names)
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")

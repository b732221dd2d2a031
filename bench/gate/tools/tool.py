"""Tool: what compares two commits of `bench.gate.repository`, by its own command line."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from bench.gate.repository import BASE, Repository

__all__ = [
    "INCONCLUSIVE",
    "PASS",
    "REGRESSED",
    "Outcome",
    "Tool",
    "ToolFailedError",
    "branches_of",
    "patience",
]

REGRESSED, PASS, INCONCLUSIVE = "REGRESSED", "PASS", "INCONCLUSIVE"
_SPARE_SECONDS = 120.0


class ToolFailedError(RuntimeError):
    """A tool's command lines ended as they should, and what they told is no comparison."""


@dataclass(frozen=True)
class Outcome:
    """What a tool said of one call.

    Attributes:
        verdicts: by the names of its rules: "REGRESSED", "PASS", "IMPROVED" or "INCONCLUSIVE".
        estimates: by the same names the relative change of the time, by which a threshold can be moved; -inf
            is below each, where a rule has also to be sure and was not.
        raw: what these were made of.
    """

    verdicts: dict[str, str]
    estimates: dict[str, float]
    raw: dict[str, Any] = field(default_factory=dict)


class Tool(ABC):
    """One of the tools.

    Attributes:
        name: of it.
        packages: that it needs, by their names in the package index.
        effort: to begin with.
        least_effort: with less of it nothing can be compared.
    """

    name: str
    packages: tuple[str, ...]
    effort: float
    least_effort: float

    def prepare(self, repository: Repository) -> None:  # noqa: B027  most have nothing to do
        """What is done once, and counts for no comparison."""

    @abstractmethod
    def compare(
        self, repository: Repository, head: str, names: tuple[str, ...], effort: float, seconds: float
    ) -> dict[str, Outcome]:
        """Compare the branch `head` with the base.

        Args:
            repository: that has both.
            head: the branch.
            names: of the calls.
            effort: how long it measures; the tool's own unit.
            seconds: that the comparison may take; it is ended after four times as many and two minutes.

        Raises:
            CommandFailedError: one of its commands failed.
            ToolFailedError: it did not compare.
        """


def patience(seconds: float) -> float:
    """Seconds after which a command is ended whose comparison may take `seconds`."""
    return 4 * seconds + _SPARE_SECONDS


def branches_of(head: str) -> dict[str, str]:
    """Of each side, by its name, the branch."""
    return {BASE: BASE, "head": head}

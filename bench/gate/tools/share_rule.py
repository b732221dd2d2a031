"""Rules such as "mean:5%": a number of the head may be larger than the base's by such a share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.gate.tools.tool import PASS, REGRESSED, Outcome

__all__ = ["field_of", "judged", "threshold_of"]


def field_of(rule: str) -> str:
    """Of "mean:5%" the mean."""
    return rule.partition(":")[0]


def threshold_of(rule: str) -> float:
    """Of "mean:5%" the 5, in percent."""
    return float(rule.partition(":")[2].rstrip("%"))


def judged(raw: Mapping[str, Any], rules: tuple[str, ...]) -> Outcome:
    """What rules such as "mean:5%" say of the numbers of two sides."""
    estimates = {rule: raw["head"][field_of(rule)] / raw["base"][field_of(rule)] - 1 for rule in rules}
    verdicts = {
        rule: REGRESSED if 100 * value > threshold_of(rule) else PASS for rule, value in estimates.items()
    }
    return Outcome(verdicts, estimates, dict(raw))

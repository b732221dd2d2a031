"""Objectives: what a search makes small or large."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stackwise.prototype.search.trial import SearchTrial
from stackwise.support.arguments import check_choice, require

__all__ = ["OBJECTIVES", "Objective", "read_objectives"]


@dataclass(frozen=True)
class Objective:
    """One number of a trial.

    Attributes:
        name: also the attribute of a `SearchTrial`.
        maximize: whether more is better.
        unit: in a word or two.
        failed: what a failed trial counts as where none has succeeded yet; None: twice the loss of a uniform
            guess, 2 ln V for a vocabulary of V, made negative where more is better.
    """

    name: str
    maximize: bool
    unit: str
    failed: float | None = None

    @property
    def direction(self) -> str:
        """As Optuna calls it."""
        return "maximize" if self.maximize else "minimize"

    def of(self, trial: SearchTrial) -> float | None:
        """Of a trial; None: it is not known, or not finite."""
        value = getattr(trial, self.name)
        return None if value is None or not math.isfinite(value) else float(value)

    def cost(self, trial: SearchTrial) -> float:
        """The same, so that less is better; infinite where it is not known."""
        value = self.of(trial)
        return math.inf if value is None else (-value if self.maximize else value)

    def when_failed(self, values: Sequence[float], vocab_size: int) -> float:
        """What a sampler is told of a trial without this number: the worst of the `values` of successes."""
        if values:
            return min(values) if self.maximize else max(values)
        if self.failed is not None:
            return self.failed
        return (-2.0 if self.maximize else 2.0) * math.log(vocab_size)


OBJECTIVES = {
    each.name: each
    for each in (
        Objective("loss", maximize=False, unit="nats"),
        Objective("score", maximize=True, unit="nats"),
        Objective("tokens_per_second", maximize=True, unit="tokens/s", failed=0.0),
        Objective("peak_bytes", maximize=False, unit="bytes", failed=2.0**40),
        Objective("parameters", maximize=False, unit="parameters", failed=2.0**40),
    )
}


def read_objectives(given: str | Sequence[str]) -> tuple[Objective, ...]:
    """By name, one or several.

    Raises:
        ValueError: a name that is none, or comes twice.
    """
    names = (given,) if isinstance(given, str) else tuple(given)
    require(len(names) > 0, "objective", given, "one or more")
    for name in names:
        check_choice("objective", name, OBJECTIVES)
    require(len(set(names)) == len(names), "objective", given, "each of them once")
    return tuple(OBJECTIVES[name] for name in names)

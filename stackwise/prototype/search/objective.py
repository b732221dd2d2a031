"""Objectives: numbers of a trial that a search minimizes or maximizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stackwise.prototype.search.trial import SearchTrial
from stackwise.support.arguments import check_choice, require

__all__ = ["OBJECTIVES", "Objective", "read_objectives"]


@dataclass(frozen=True)
class Objective:
    """Number of a trial that is minimized or maximized.

    Attributes:
        name: name of the objective and of the attribute of a `SearchTrial`.
        maximize: True if higher is better.
        unit: unit in a word or two.
        failed: value of a failed trial before the first success. None: twice the loss of a uniform guess, 2
            ln V for a vocabulary of V, negative if higher is better.
    """

    name: str
    maximize: bool
    unit: str
    failed: float | None = None

    @property
    def direction(self) -> str:
        """Direction in Optuna's terms."""
        return "maximize" if self.maximize else "minimize"

    def of(self, trial: SearchTrial) -> float | None:
        """Return the value of a trial. None: unknown, or not finite."""
        value = getattr(trial, self.name)
        return None if value is None or not math.isfinite(value) else float(value)

    def cost(self, trial: SearchTrial) -> float:
        """Return the value with a sign for which lower is better. Infinite if unknown."""
        value = self.of(trial)
        return math.inf if value is None else (-value if self.maximize else value)

    def when_failed(self, values: Sequence[float], vocab_size: int) -> float:
        """Return the sampler's value of a trial without this number: the worst of the successes' `values`."""
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
    """Return one or several objectives by name.

    Raises:
        ValueError: an unknown or repeated name.
    """
    names = (given,) if isinstance(given, str) else tuple(given)
    require(len(names) > 0, "objective", given, "one or more")
    for name in names:
        check_choice("objective", name, OBJECTIVES)
    require(len(set(names)) == len(names), "objective", given, "each of them once")
    return tuple(OBJECTIVES[name] for name in names)

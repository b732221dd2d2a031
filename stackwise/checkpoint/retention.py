"""Retention: selection of the checkpoints that remain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stackwise.support.arguments import check_sizes, require

__all__ = ["Retention"]


@dataclass(frozen=True)
class Retention:
    """Selection of the checkpoints that remain after a save.

    Attributes:
        keep_last: number of newest checkpoints, by step.
        keep_every: divisor of the steps of further checkpoints; None: no such checkpoints.
        keep_best: number of checkpoints with the best metric, the newest of equal ones.
        lower_is_better: True if a lower metric is better.

    Raises:
        ValueError: an invalid number of checkpoints.
    """

    keep_last: int = 3
    keep_every: int | None = None
    keep_best: int = 0
    lower_is_better: bool = True

    def __post_init__(self) -> None:
        check_sizes(keep_last=self.keep_last)
        check_sizes(0, keep_best=self.keep_best)
        if self.keep_every is not None:
            check_sizes(keep_every=self.keep_every)
        is_bool = isinstance(self.lower_is_better, bool)
        require(is_bool, "lower_is_better", self.lower_is_better, "True or False")

    def kept(self, metrics: Mapping[int, float | None]) -> set[int]:
        """Return the steps that remain of those in `metrics`, which has the metric of every step, or None."""
        kept = set(sorted(metrics)[-self.keep_last :]) | set(self.ranked(metrics)[: self.keep_best])
        if self.keep_every is not None:
            kept |= {step for step in metrics if step % self.keep_every == 0}
        return kept

    def ranked(self, metrics: Mapping[int, float | None]) -> list[int]:
        """Return the steps with a finite metric, the best first, the newest first of equal ones."""
        sign = 1 if self.lower_is_better else -1
        known = {step: sign * m for step, m in metrics.items() if m is not None and math.isfinite(m)}
        return sorted(known, key=lambda step: (known[step], -step))

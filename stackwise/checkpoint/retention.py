"""Retention: which checkpoints stay."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from stackwise.support.arguments import check_sizes, require

__all__ = ["Retention"]


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay when one has been written.

    Attributes:
        keep_last: how many of the newest, by step.
        keep_every: those of steps that this divides; None: of none.
        keep_best: how many of those with the best metric; of equal ones the newest.
        lower_is_better: of metrics.

    Raises:
        ValueError: what no number of checkpoints can be.
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

    def kept(self, metrics: Mapping[int, float | None], damaged: Collection[int] = ()) -> set[int]:
        """The steps that stay.

        Args:
            metrics: of every step that there is; None where it has none.
            damaged: steps that are known to be. They are not counted, and stay as long as an older one does.
        """
        sound = sorted(set(metrics) - set(damaged))
        kept = set(sound[-self.keep_last :])
        if self.keep_every is not None:
            kept |= {step for step in sound if step % self.keep_every == 0}
        kept |= set(self.ranked({step: metrics[step] for step in sound})[: self.keep_best])
        oldest = min(sound[-self.keep_last :], default=0)
        return kept | {step for step in damaged if step in metrics and step >= oldest}

    def ranked(self, metrics: Mapping[int, float | None]) -> list[int]:
        """The steps with a metric that is a finite number, the best first; of equal ones the newest."""
        sign = 1 if self.lower_is_better else -1
        known = {step: sign * m for step, m in metrics.items() if m is not None and math.isfinite(m)}
        return sorted(known, key=lambda step: (known[step], -step))

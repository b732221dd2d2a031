"""LogHistory: logarithms of numbers that sound steps had, on the device, with their level and scatter.

Shapes: S signals, each with a history of its own; H numbers in each.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LogHistory", "Statistics"]


class Statistics(NamedTuple):
    """Of each signal's history, float64 (float32 on MPS).

    Attributes:
        level_S: the median of the last `recent` logarithms; NaN where there are none.
        scatter_S: the MAD of the changes from each to the next.
        enough_S: boolean, whether there are `minimum` of them.
    """

    level_S: Tensor
    scatter_S: Tensor
    enough_S: Tensor


class LogHistory:
    """The last `history` numbers of several signals, as one tensor: a step costs as much as with one signal.

    Numbers that are not positive and finite say nothing, and are not remembered.

    Args:
        device: where the numbers are.
        signals: how many.
        recent: how many of the last numbers give the level.
        history: how many are kept.
        minimum: how many there must be.
    """

    def __init__(
        self, device: torch.device, *, signals: int, recent: int, history: int, minimum: int
    ) -> None:
        self.recent, self.minimum = recent, minimum
        wide = torch.float32 if device.type == "mps" else torch.float64
        # Oldest first, the newest last; NaN where there are not so many yet.
        self.logs_SH = torch.full((signals, history), math.nan, dtype=wide, device=device)
        self._statistics: Statistics | None = None

    def statistics(self) -> Statistics:
        """Of what is remembered now; computed once for each history."""
        if self._statistics is None:
            changes_SH = self.logs_SH.diff()
            deviations_SH = (changes_SH - _median(changes_SH)[:, None]).abs()
            # Of one number there is no change, and no scatter.
            scatter_S = _median(deviations_SH).nan_to_num(0.0)
            enough_S = (~self.logs_SH.isnan()).sum(1) >= self.minimum
            self._statistics = Statistics(_median(self.logs_SH[:, -self.recent :]), scatter_S, enough_S)
        return self._statistics

    def far_level(self, signal: int) -> Tensor:
        """The median of all logarithms of one signal, a scalar; NaN: there are none."""
        return _median(self.logs_SH[signal : signal + 1])[0]

    def accept(self, values_S: Tensor, sound: Tensor) -> None:
        """Remember `values_S` where `sound`, a boolean scalar on the device, says so."""
        values_S = values_S.to(self.logs_SH.dtype)
        taken_S = sound & (values_S > 0) & values_S.isfinite()
        moved_SH = torch.cat([self.logs_SH[:, 1:], values_S.log()[:, None]], dim=1)
        self.logs_SH = torch.where(taken_S[:, None], moved_SH, self.logs_SH)
        self._statistics = None

    def load(self, logs_SH: Tensor) -> None:
        """Go on from such a tensor, copied; of a longer history the end is taken."""
        size = self.logs_SH.shape[1]
        logs_SH = logs_SH.to(self.logs_SH)[:, -size:]
        missing = self.logs_SH.new_full((len(logs_SH), size - logs_SH.shape[1]), math.nan)
        self.logs_SH = torch.cat([missing, logs_SH], dim=1)
        self._statistics = None


def _median(values_SH: Tensor) -> Tensor:
    """Of those in a row that are numbers, the mean of the two in the middle of an even count; NaN: none.

    `torch.nanmedian` takes the lower of the two.
    """
    if not values_SH.shape[1]:
        return values_SH.new_full((len(values_SH),), math.nan)
    ordered_SH = values_SH.sort(dim=1).values  # NaN comes last
    count_S = (~values_SH.isnan()).sum(1)
    middle_S2 = torch.stack([count_S - 1, count_S], dim=1).clamp(min=0) // 2
    # Not by ordered_SH[...], which asks the device for the number.
    return ordered_SH.gather(1, middle_S2.clamp(max=values_SH.shape[1] - 1)).mean(1)

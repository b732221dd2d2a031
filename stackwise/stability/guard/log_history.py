"""LogHistory: logarithms of the numbers of healthy steps, on the device, with their level and scatter.

Shapes: S signals, each with its own history; H numbers in each.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LogHistory", "Statistics"]


class Statistics(NamedTuple):
    """Statistics of each signal's history, float64 (float32 on MPS).

    Attributes:
        level_S: median of the last `recent` logarithms; NaN if the history is empty.
        scatter_S: MAD of the changes from each number to the next.
        enough_S: boolean, True if the history has at least `minimum` numbers.
    """

    level_S: Tensor
    scatter_S: Tensor
    enough_S: Tensor


class LogHistory:
    """The last `history` numbers of several signals, in one tensor: a step costs as much as with one signal.

    Numbers that are not positive and finite are ignored.

    Args:
        device: device of the numbers.
        signals: number of signals.
        recent: number of the last numbers that define the level.
        history: number of stored numbers.
        minimum: number of numbers that a history needs.
    """

    def __init__(
        self, device: torch.device, *, signals: int, recent: int, history: int, minimum: int
    ) -> None:
        self.recent, self.minimum = recent, minimum
        wide = torch.float32 if device.type == "mps" else torch.float64
        # Oldest first. Free places are NaN.
        self.logs_SH = torch.full((signals, history), math.nan, dtype=wide, device=device)
        self._statistics: Statistics | None = None

    def statistics(self) -> Statistics:
        """Return the statistics of the current history. They are computed once for each history."""
        if self._statistics is None:
            changes_SH = self.logs_SH.diff()
            deviations_SH = (changes_SH - _median(changes_SH)[:, None]).abs()
            # One number has no change, and no scatter.
            scatter_S = _median(deviations_SH).nan_to_num(0.0)
            enough_S = (~self.logs_SH.isnan()).sum(1) >= self.minimum
            self._statistics = Statistics(_median(self.logs_SH[:, -self.recent :]), scatter_S, enough_S)
        return self._statistics

    def far_level(self, signal: int) -> Tensor:
        """Return the median of all logarithms of one signal, a scalar; NaN if the history is empty."""
        return _median(self.logs_SH[signal : signal + 1])[0]

    def accept(self, values_S: Tensor, sound: Tensor) -> None:
        """Record `values_S` if `sound`, a boolean scalar on the device, is true."""
        values_S = values_S.to(self.logs_SH.dtype)
        taken_S = sound & (values_S > 0) & values_S.isfinite()
        moved_SH = torch.cat([self.logs_SH[:, 1:], values_S.log()[:, None]], dim=1)
        self.logs_SH = torch.where(taken_S[:, None], moved_SH, self.logs_SH)
        self._statistics = None

    def load(self, logs_SH: Tensor) -> None:
        """Continue from a copy of such a tensor. Of a longer history, the last numbers are used."""
        size = self.logs_SH.shape[1]
        logs_SH = logs_SH.to(self.logs_SH)[:, -size:]
        missing = self.logs_SH.new_full((len(logs_SH), size - logs_SH.shape[1]), math.nan)
        self.logs_SH = torch.cat([missing, logs_SH], dim=1)
        self._statistics = None


def _median(values_SH: Tensor) -> Tensor:
    """Return the median of each row without its NaN; NaN if a row has only NaN.

    For an even count it is the mean of the two middle numbers. `torch.nanmedian` returns the lower one.
    """
    if not values_SH.shape[1]:
        return values_SH.new_full((len(values_SH),), math.nan)
    ordered_SH = values_SH.sort(dim=1).values  # NaN last
    count_S = (~values_SH.isnan()).sum(1)
    middle_S2 = torch.stack([count_S - 1, count_S], dim=1).clamp(min=0) // 2
    # Not by ordered_SH[...], which makes the host wait.
    return ordered_SH.gather(1, middle_S2.clamp(max=values_SH.shape[1] - 1)).mean(1)

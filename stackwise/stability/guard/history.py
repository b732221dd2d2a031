"""Histories of earlier steps, with which the next step is compared: recent numbers, largest numbers, replays.

Shapes: S signals (norm, loss, attention logit), each with its own history; H numbers in each; N steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stackwise.support.arguments import require

__all__ = ["LogHistory", "ReplayReference", "SpikeMemory", "Statistics"]

_FADE_STEPS = 2000  # healthy steps in which a remembered number falls to 1/e
_SIGNALS = 3


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


class SpikeMemory:
    """Decaying maxima of several signals, as logarithms; -inf if no number was recorded.

    Args:
        signals: number of signals.
        device: device of the numbers.
        dtype: floating-point type of the logarithms.

    Attributes:
        largest_S: largest number of a healthy step, or of a spike that was learned.
        unusual_S: largest number above its ordinary limit, of a healthy step or of a spike that was learned.
    """

    def __init__(self, *, signals: int, device: torch.device, dtype: torch.dtype) -> None:
        nothing_S = torch.full((signals,), -math.inf, dtype=dtype, device=device)
        self.largest_S = self.unusual_S = nothing_S
        self._last_spike_S = nothing_S
        self._pending_S = nothing_S  # spikes that are learned with the next healthy step

    def accept(self, values_S: Tensor, unusual_S: Tensor, healthy: Tensor) -> None:
        """Remember a healthy step, and learn the spikes that are pending.

        Args:
            values_S: numbers of the step. Numbers that are not positive and finite are ignored.
            unusual_S: boolean, True for a number above its ordinary limit.
            healthy: boolean scalar on the device; False: no change.
        """
        logs_S = self._logs(values_S)
        unusual_logs_S = torch.where(unusual_S, logs_S, -math.inf)
        largest_S = (self.largest_S - 1 / _FADE_STEPS).maximum(logs_S).maximum(self._pending_S)
        raised_S = (self.unusual_S - 1 / _FADE_STEPS).maximum(unusual_logs_S).maximum(self._pending_S)
        self.largest_S = torch.where(healthy, largest_S, self.largest_S)
        self.unusual_S = torch.where(healthy, raised_S, self.unusual_S)
        self._pending_S = torch.where(healthy, -math.inf, self._pending_S)

    def note(self, values_S: Tensor, unusual_S: Tensor, spike: Tensor) -> None:
        """Note the numbers of a spike that is skipped, for `learn`.

        Args:
            values_S: numbers of the step.
            unusual_S: boolean, True for a number above its ordinary limit. Only these are noted.
            spike: boolean scalar on the device; False: no change.
        """
        noted_S = torch.where(unusual_S, self._logs(values_S), -math.inf)
        self._last_spike_S = torch.where(spike, noted_S, self._last_spike_S)

    def learn(self, *, at_once: bool) -> None:
        """Remember the noted spike, at once or with the next healthy step. Such spikes then pass."""
        self._pending_S = self._pending_S.maximum(self._last_spike_S)
        self._last_spike_S = torch.full_like(self._last_spike_S, -math.inf)
        if at_once:
            self.largest_S = self.largest_S.maximum(self._pending_S)
            self.unusual_S = self.unusual_S.maximum(self._pending_S)

    def forget_pending(self) -> None:
        """Do not learn the pending spikes, because a rewind undoes their steps."""
        self._pending_S = torch.full_like(self._pending_S, -math.inf)

    def state(self) -> Tensor:
        """Return a copy of the memory, shape (4, S)."""
        return torch.stack([self.largest_S, self.unusual_S, self._last_spike_S, self._pending_S])

    def load(self, state_4S: Tensor) -> None:
        """Continue from a `state`.

        Raises:
            ValueError: another shape.
        """
        shape = (4, *self.largest_S.shape)
        require(state_4S.shape == shape, "state['memory']", tuple(state_4S.shape), f"the shape {shape}")
        copied_4S = state_4S.to(self.largest_S, copy=True)
        self.largest_S, self.unusual_S, self._last_spike_S, self._pending_S = copied_4S.unbind()

    def _logs(self, values_S: Tensor) -> Tensor:
        """Return logarithms; -inf for numbers that are not positive and finite."""
        known_S = (values_S > 0) & values_S.isfinite()
        return torch.where(known_S, values_S.to(self.largest_S.dtype).log(), -math.inf)


class ReplayReference:
    """Signals of the healthy steps since the last snapshot.

    A replayed step has the same weights and batches, and so the same signals. Directly after the snapshot,
    the history may be too short to judge it.

    Args:
        device: device on which steps are judged.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded: dict[int, tuple[float, ...]] = {}
        self._replayed: dict[int, Tensor] = {}

    def record(self, step: int, norm: float, loss: float, logit: float) -> None:
        """Record a healthy step. A replay keeps the first record. A logit of NaN: none was passed."""
        self._recorded.setdefault(step, (norm, loss, logit))

    def forget(self, *, before: int) -> None:
        """Forget the steps with a number below `before`, which will not be replayed."""
        self._recorded = {step: signals for step, signals in self._recorded.items() if step >= before}
        self._replayed = {step: signals_S for step, signals_S in self._replayed.items() if step >= before}

    def start_replay(self) -> None:
        """Prepare the signals of all recorded steps for their replay."""
        wide = torch.float32 if self._device.type == "mps" else torch.float64
        rows = list(self._recorded.values())
        values_NS = torch.tensor(rows, dtype=wide).reshape(len(rows), _SIGNALS).to(self._device)
        self._replayed = dict(zip(self._recorded, values_NS.unbind(), strict=True))

    def signals_of(self, step: int) -> Tensor | None:
        """Return the signals of the step's first execution, on the device; None: it is not a replay."""
        return self._replayed.get(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the signals of the steps to be replayed: plain numbers, None instead of NaN."""
        return {
            "steps": list(self._replayed),
            "signals": [
                [None if math.isnan(value) else value for value in signals_S.tolist()]
                for signals_S in self._replayed.values()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`.

        Raises:
            ValueError: not such a state.
        """
        steps: Any = state.get("steps")
        signals: Any = state.get("signals")
        lists = isinstance(steps, list) and isinstance(signals, list) and len(steps) == len(signals)
        fits = lists and all(isinstance(step, int) for step in steps) and all(map(_is_row, signals))
        require(fits, "replay_reference", state, "a result of state_dict()")
        self._recorded = {
            step: tuple(math.nan if value is None else float(value) for value in row)
            for step, row in zip(steps, signals, strict=True)
        }
        self.start_replay()


def _is_row(row: Any) -> bool:
    fits = isinstance(row, list) and len(row) == _SIGNALS
    return fits and all(isinstance(value, int | float | None) for value in row)

"""SpikeMemory: largest numbers of a training run, on the device. They decay over thousands of steps.

Healthy training can contain rare spikes: a rare class, a rare reward, a change of the task. They may be
hundreds of steps apart, so the recent history does not show them. This memory does.

Shapes: S signals, each with its own memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stackwise.support.arguments import require

__all__ = ["SpikeMemory"]

_FADE_STEPS = 2000  # healthy steps in which a remembered number falls to 1/e


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

"""Buffers: those of a model before a forward pass, to be put back where the step is left out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Buffers"]


class Buffers:
    """Copies of what a forward pass may change beside weights: running statistics, counts.

    All are copied each time. Their version counters do not tell which have changed: batch normalization
    writes its statistics without raising them.

    Args:
        model: whose buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """Remember them as they are."""
        kept = {}
        for name, buffer in self._model.named_buffers():
            place = self._kept.get(name)
            fits = place is not None and place.shape == buffer.shape and place.dtype == buffer.dtype
            if place is None or not fits or place.device != buffer.device:
                place = torch.empty_like(buffer)
            kept[name] = place.copy_(buffer)
        self._kept = kept

    @torch.no_grad()
    def restore(self, broken: Tensor | None = None) -> None:
        """Put them back.

        Args:
            broken: a boolean scalar on the device: only where it is true. None: in any case.
        """
        for name, buffer in self._model.named_buffers():
            copy = self._kept.get(name)
            # One of another shape is no statistic, but something computed for a longer input.
            if copy is not None and buffer.shape == copy.shape:
                buffer.copy_(copy if broken is None else torch.where(broken, copy, buffer))

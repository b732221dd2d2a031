"""Buffers: copies of the tensors that forward passes write, to restore them if a step is skipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stackwise.stability.non_finite import examinable, non_finite

__all__ = ["BrokenBuffers", "Buffers", "elements"]


class BrokenBuffers(NamedTuple):
    """Buffers that became non-finite. Shapes: B buffers.

    Attributes:
        buffers: names of all buffers that were examined.
        flags_B: boolean, True if the buffer has a NaN or +inf and had none before.
    """

    buffers: tuple[str, ...]
    flags_B: Tensor

    def names(self) -> list[str]:
        """Return the names of the non-finite buffers. The host waits."""
        return [name for name, flag in zip(self.buffers, self.flags_B.tolist(), strict=True) if flag]


class Buffers:
    """Copies of the tensors that a forward pass may change, apart from the trained weights.

    All buffers, such as running statistics and counters, are copied each time. Their version counters do not
    show which of them have changed, because batch normalization writes its statistics without increasing
    them.

    For weights without a gradient, such as a running average of other weights, the version counters show a
    write, but not its author. For example, a target network is written by the loop, which is responsible for
    it. So a weight is copied only after a recomputation in which its own forward passes wrote it. All other
    weights are never copied. Writes through `.data` and in shards are not detected.

    Args:
        model: model with the buffers and weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._weights = [
            (name, p)
            for name, p in model.named_parameters()
            # Neither lazy nor a wrapper of other tensors.
            if not (is_lazy(p) or p.is_inference() or hasattr(p, "__tensor_flatten__"))
        ]
        self._versions: list[int] = []  # of the weights, at the last `keep`
        self._candidates: dict[str, nn.Parameter] = {}  # written between two recomputations, by unknown code
        self._looked_at: dict[str, nn.Parameter] = {}  # candidates in the current recomputation
        self._written: dict[str, nn.Parameter] = {}  # weights that forward passes write
        self._kept: dict[str, Tensor] = {}
        # Buffers that are not finite in a healthy model, by the names and shapes that were examined.
        self._usual: tuple[list[tuple[str, torch.Size]], Tensor] | None = None

    @torch.no_grad()
    def broken(self) -> BrokenBuffers | None:
        """Return the buffers that got a NaN or +inf. The host does not wait.

        Ignored are -inf, which masks contain, buffers that had a NaN or +inf when they were first examined,
        and buffers whose shape changed since the last `keep`. None: no buffer can be examined.
        """
        found: dict[str, Tensor] = {}
        for name, tensor in self._tensors(self._written):
            kept = self._kept.get(name)
            if kept is not None and kept.shape == tensor.shape:
                part = examinable(tensor)
                if part is not None:
                    found[name] = part
        if not found:
            return None
        examined = [(name, part.shape) for name, part in found.items()]
        if self._usual is None or self._usual[0] != examined:
            before = [part for name in found if (part := examinable(self._kept[name])) is not None]
            self._usual = examined, non_finite(before, masks=True)
        flags_B = non_finite(list(found.values()), masks=True) & ~self._usual[1]
        return BrokenBuffers(tuple(found), flags_B)

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the current values."""
        kept = {}
        for name, tensor in self._tensors(self._written | self._looked_at):
            place = self._kept.get(name)
            fits = place is not None and place.shape == tensor.shape and place.dtype == tensor.dtype
            if place is None or not fits or place.device != tensor.device:
                place = torch.empty_like(tensor)
            kept[name] = place.copy_(tensor)
        self._kept = kept
        self._versions = [p._version for _, p in self._weights]

    def note_written(self) -> None:
        """Note the weights without a gradient that a step wrote, as candidates for the next recomputation."""
        self._candidates.update(self._changed())

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Copy the tensors, and restore them after the block. Only its forward passes may write them."""
        self._looked_at, self._candidates = self._candidates, {}
        self.keep()
        try:
            yield
        finally:
            self.restore()
            self._looked_at = {}

    @torch.no_grad()
    def restore(self, broken: Tensor | None = None) -> None:
        """Restore the copied values.

        Args:
            broken: boolean scalar on the device: restore only if it is true. None: always restore.
        """
        if self._looked_at:
            self._written |= {name: p for name, p in self._changed() if name in self._looked_at}
        for name, tensor in self._tensors(self._written):
            copy = self._kept.get(name)
            # A tensor of another shape is no statistic: it was computed for a longer input.
            if copy is not None and tensor.shape == copy.shape:
                tensor.copy_(copy if broken is None else torch.where(broken, copy, tensor))

    def _changed(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the weights without a gradient that were written since the last `keep`."""
        for (name, p), version in zip(self._weights, self._versions, strict=True):
            if p._version != version and not p.requires_grad:
                yield name, p

    def _tensors(self, weights: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self._model.named_buffers():
            if not is_lazy(buffer):
                yield name, elements(buffer)
        for name, p in weights.items():
            if not p.requires_grad:
                yield name, elements(p)


def elements(tensor: Tensor) -> Tensor:
    """Return a view with each element in memory once, because torch cannot write to an expanded tensor."""
    if tensor.layout is torch.strided and 0 in tensor.stride():
        for dimension, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dimension] > 1:
                tensor = tensor.narrow(dimension, 0, 1)
    return tensor

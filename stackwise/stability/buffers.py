"""Buffers: what forward passes write of a model, as it was, to be put back where the step is left out."""

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
    """Buffers that are not finite any more. Shapes: B buffers.

    Attributes:
        buffers: names of all buffers that were examined.
        flags_B: boolean, True if the buffer has a NaN or +inf and had none before.
    """

    buffers: tuple[str, ...]
    flags_B: Tensor

    def names(self) -> list[str]:
        """Return the names of the broken buffers. The host waits."""
        return [name for name, flag in zip(self.buffers, self.flags_B.tolist(), strict=True) if flag]


class Buffers:
    """Copies of what a forward pass may change beside the weights that are trained.

    Of buffers, such as running statistics and counts, all are copied each time. Their version counters do not
    tell which have changed: batch normalization writes its statistics without raising them.

    Of weights without a gradient, such as a running average of others, the counters do tell, but not by whom
    they were written: a target network is its loop's affair. So a weight is copied each time from the first
    look on whose own forward passes wrote it; the others stay as they are, and cost nothing. What is written
    through `.data` is not seen, nor what is in shards.

    Args:
        model: whose buffers and weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._weights = [
            (name, p)
            for name, p in model.named_parameters()
            # Of no module that is lazy still, and of no tensor around others.
            if not (is_lazy(p) or p.is_inference() or hasattr(p, "__tensor_flatten__"))
        ]
        self._versions: list[int] = []  # of the weights, when they were kept
        self._candidates: dict[str, nn.Parameter] = {}  # written between two looks, by whom is not known
        self._looked_at: dict[str, nn.Parameter] = {}  # candidates of the look at hand
        self._written: dict[str, nn.Parameter] = {}  # by forward passes
        self._kept: dict[str, Tensor] = {}
        # Buffers that are not finite in a healthy model, by the names and shapes that were examined.
        self._usual: tuple[list[tuple[str, torch.Size]], Tensor] | None = None

    @torch.no_grad()
    def broken(self) -> BrokenBuffers | None:
        """Return the buffers that got a NaN or +inf. The host does not wait.

        Ignored are -inf, of which masks are made, buffers that had a NaN or +inf when they were first
        examined, and buffers whose shape changed since the last `keep`. None: no buffer can be examined.
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
        """Remember them as they are."""
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
        """Behind a step: weights without a gradient that it wrote are looked at by the next look."""
        self._candidates.update(self._changed())

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Keep them for forward passes by which alone they are written, and put them back behind these."""
        self._looked_at, self._candidates = self._candidates, {}
        self.keep()
        try:
            yield
        finally:
            self.restore()
            self._looked_at = {}

    @torch.no_grad()
    def restore(self, broken: Tensor | None = None) -> None:
        """Put them back.

        Args:
            broken: a boolean scalar on the device: only where it is true. None: in any case.
        """
        if self._looked_at:
            self._written |= {name: p for name, p in self._changed() if name in self._looked_at}
        for name, tensor in self._tensors(self._written):
            copy = self._kept.get(name)
            # One of another shape is no statistic, but something computed for a longer input.
            if copy is not None and tensor.shape == copy.shape:
                tensor.copy_(copy if broken is None else torch.where(broken, copy, tensor))

    def _changed(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Weights without a gradient that were written since they were kept."""
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
    """A view that has each element in memory once: an expanded tensor cannot be written as a whole."""
    if tensor.layout is torch.strided and 0 in tensor.stride():
        for dimension, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[dimension] > 1:
                tensor = tensor.narrow(dimension, 0, 1)
    return tensor

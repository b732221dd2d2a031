"""WeightPath: where the weights of a run have been, and how far they end from those of another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["WeightPath"]

_Digest = tuple[float, ...]


class WeightPath:
    """The weights of a model before each step and at the end. Waits for the device at each step.

    Args:
        model: whose parameters are followed.
        marks: steps from which on the way is measured.
    """

    def __init__(self, model: nn.Module, marks: Sequence[int] = ()) -> None:
        self._model, self._marks = model, frozenset(marks)
        self._digests: list[_Digest] = []
        self._at: dict[int, list[Tensor]] = {}
        self._end: list[Tensor] = []

    def before_step(self) -> None:
        """Note the weights that the next step finds."""
        step = len(self._digests)
        if step in self._marks:
            self._at[step] = _copies(self._model)
        self._digests.append(_digest(self._model))

    def finish(self) -> None:
        """Note the weights that the last step has left."""
        self._digests.append(_digest(self._model))
        self._end = _copies(self._model)

    def leaves_no_trace(self, step: int, within: int) -> bool:
        """Whether the weights behind a step, or one of the `within` after it, were there before it."""
        known = set(self._digests[: step + 1])
        return any(digest in known for digest in self._digests[step + 1 : step + within + 2])

    def drift(self, clean: WeightPath, mark: int) -> float:
        """How far apart the ways of both are since the step `mark`, in lengths of the clean one's.

        0 where both have gone the same way, 1 where ours has not gone at all; infinite where weights are not
        finite.
        """
        clean_way = _difference(clean._end, clean._at[mark])
        apart = _length(_difference(_difference(self._end, self._at[mark]), clean_way))
        length = _length(clean_way)
        if not math.isfinite(apart) or not math.isfinite(length):
            return math.inf
        if apart == 0:
            return 0.0
        return apart / length if length else math.inf


def _copies(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def _digest(model: nn.Module) -> _Digest:
    """Two sums of each parameter. Those of NaN are equal to none, their own included."""
    sums = []
    for parameter in model.parameters():
        values = _reals(parameter.detach())
        sums += [values.sum(), values.square().sum()]
    return tuple(float(each) for each in sums)


def _difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    return [_reals(x) - _reals(y) for x, y in zip(a, b, strict=True)]


def _length(way: Sequence[Tensor]) -> float:
    return math.hypot(*(float(each.norm()) for each in way))


def _reals(tensor: Tensor) -> Tensor:
    """In float64, complex numbers as two."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()

"""WeightPath: weights of a run at its steps, and their distance to the weights of another run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["WeightPath"]

_Digest = tuple[float, ...]


class WeightPath:
    """Weights of a model before each step and at the end. The host waits for the device at each step.

    Args:
        model: model whose parameters are recorded.
        marks: steps from which a drift can be computed.
    """

    def __init__(self, model: nn.Module, marks: Sequence[int] = ()) -> None:
        self._model, self._marks = model, frozenset(marks)
        self._digests: list[_Digest] = []
        self._at: dict[int, list[Tensor]] = {}
        self._end: list[Tensor] = []

    def before_step(self) -> None:
        """Record the weights before the next step."""
        step = len(self._digests)
        if step in self._marks:
            self._at[step] = _copies(self._model)
        self._digests.append(_digest(self._model))

    def finish(self) -> None:
        """Record the weights after the last step."""
        self._digests.append(_digest(self._model))
        self._end = _copies(self._model)

    def leaves_no_trace(self, step: int, within: int) -> bool:
        """Return True if a step was skipped or undone.

        This is the case if the weights after it, or after one of the next `within` steps, equal weights from
        before it.
        """
        known = set(self._digests[: step + 1])
        return any(digest in known for digest in self._digests[step + 1 : step + within + 2])

    def drift(self, clean: WeightPath, mark: int) -> float:
        """Return the distance between both weight changes since step `mark`, relative to that of `clean`.

        0: both changes are equal. A value of 1 results, for example, if our weights have not moved. Infinite:
        weights are not finite.
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
    """Return two sums of each parameter. A sum that is NaN is equal to no other, not even to itself."""
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
    """Return float64 values. A complex number becomes two values."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()

"""WeightPath: weights of a run at its steps: which steps changed them, and how far another run is away."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from stackwise.stability.faults.subject import Subject
from stackwise.subject.trainer_spec import TrainingRun

__all__ = ["WeightPath"]


class WeightPath:
    """Weights of a run before each step and at the end. The host waits for the device at each step.

    Args:
        run: run whose parameters are recorded.
        marks: steps from which a drift can be computed.

    Attributes:
        updated: True if the last step made an update. It is detected by changed weights, because an optimizer
            that skips a step on the device is called all the same.
    """

    def __init__(self, run: TrainingRun, marks: Sequence[int] = ()) -> None:
        self._run, self._marks = run, frozenset(marks)
        self._digests: list[tuple[float, ...]] = []
        self._at: dict[int, list[Tensor]] = {}
        self._end: list[Tensor] = []
        self.updated = False

    @contextmanager
    def step(self, *, damages: bool) -> Iterator[None]:
        """Record one step, which runs in the block.

        Args:
            damages: True if a fault writes to the weights in this step. An update is then made only if the
                optimizer was called, too.
        """
        model, subject, calls = self._run.model, Subject.of(self._run), 0
        if len(self._digests) in self._marks:
            self._at[len(self._digests)] = _copies(model)
        self._digests.append(_digest(model))
        before = _copies(model)

        def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            nonlocal calls
            calls += subject.owns(optimizer)

        with register_optimizer_step_post_hook(count):
            yield
        self.updated = not all(map(_same, before, model.parameters())) and bool(calls or not damages)

    def finish(self) -> None:
        """Record the weights after the last step."""
        self._digests.append(_digest(self._run.model))
        self._end = _copies(self._run.model)

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


def _same(a: Tensor, b: Tensor) -> bool:
    """Return True if all values are equal. NaN is equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _digest(model: nn.Module) -> tuple[float, ...]:
    """Return two sums of each parameter. A sum that is NaN is equal to no other, not even to itself."""
    reals = [_reals(p.detach()) for p in model.parameters()]
    return tuple(float(each) for values in reals for each in (values.sum(), values.square().sum()))


def _difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    return [_reals(x) - _reals(y) for x, y in zip(a, b, strict=True)]


def _length(way: Sequence[Tensor]) -> float:
    return math.hypot(*(float(each.norm()) for each in way))


def _reals(tensor: Tensor) -> Tensor:
    """Return float64 values. A complex number becomes two values."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()

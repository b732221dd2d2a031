"""StepRecord and StepBuffer: record of a training step, and buffer of records until the host reads them.

Shapes: P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stackwise.stability.telemetry.gradient_norm import first_non_finite
from stackwise.stability.telemetry.ring_buffer import RecordBuffer
from stackwise.support.arguments import require

__all__ = ["StepBuffer", "StepRecord", "mean_loss"]


@dataclass(frozen=True)
class StepRecord:
    """Record of one training step.

    Attributes:
        step: number of the step, from 0.
        loss: loss in nats before the update. The trainer sets it to NaN if the step has no predicted tokens.
        grad_norm: global L2 norm of the gradient, before clipping.
        lr: learning rate of the update.
        skipped: True if the update was skipped.
        tokens: number of tokens of the step, including padding. None: not counted.
        parameter_norms: L2 norm of each parameter's gradient by name. None: not recorded.
        unit: trained unit. The trainer uses "rack", "stack 0" or "stack 0 block 1". None: unknown.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    tokens: int | None = None
    parameter_norms: dict[str, float] | None = None
    unit: str | None = None

    @property
    def first_non_finite(self) -> str | None:
        """Name of the first parameter with a non-finite gradient.

        None if there is none, or if norms were not recorded.
        """
        return first_non_finite(self.parameter_norms)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON, without attributes that are None."""
        return {key: value for key, value in asdict(self).items() if value is not None}


class _Known(NamedTuple):
    """Values of a step that the host knows when the step starts."""

    step: int
    lr: float
    tokens: int | None
    names: tuple[str, ...] | None
    unit: str | None


class StepBuffer(RecordBuffer[_Known, StepRecord]):
    """Buffer of step records.

    They are written on the device, and read by the host after an asynchronous copy.

    Args:
        capacity: maximum number of unread rows.
        device: device that computes the values.
        n_norms: maximum number of norms in a row, at most P.

    Raises:
        ValueError: a size is out of range.
    """

    def __init__(self, capacity: int, device: torch.device, n_norms: int = 0) -> None:
        require(n_norms >= 0, "n_norms", n_norms, "an integer >= 0")
        self._n_norms = n_norms
        super().__init__(capacity, 3 + n_norms, device)

    def write_step(
        self,
        step: int,
        lr: float,
        *,
        loss: Tensor,
        grad_norm: Tensor,
        skipped: Tensor,
        tokens: int | None = None,
        unit: str | None = None,
        norms_P: Tensor | None = None,
        names: tuple[str, ...] | None = None,
    ) -> None:
        """Queue one row. The host does not wait.

        Args:
            step: number of the step, from 0.
            lr: learning rate.
            loss: scalar.
            grad_norm: scalar.
            skipped: scalar, boolean.
            tokens: number of tokens of the step.
            unit: trained unit.
            norms_P: norms of the gradients of `names`.
            names: name for each of `norms_P`.

        Raises:
            ValueError: there are more norms than `n_norms`, or the numbers of norms and names differ.
        """
        if norms_P is not None:
            found = len(norms_P)
            require(found <= self._n_norms, "norms_P", found, f"at most n_norms={self._n_norms}")
            require(names is not None and len(names) == found, "names", names, f"{found} names")
        known = _Known(step, lr, tokens, names if norms_P is not None else None, unit)
        self.write(known, (loss, grad_norm, skipped), norms_P)

    def _record(self, tag: _Known, row: list[float]) -> StepRecord:
        loss, grad_norm, skipped, *norms = row
        named = None if tag.names is None else dict(zip(tag.names, norms, strict=False))
        return StepRecord(tag.step, loss, grad_norm, tag.lr, bool(skipped), tag.tokens, named, tag.unit)


def mean_loss(records: Sequence[StepRecord]) -> float:
    """Return the mean loss in nats. Return NaN if there are no records."""
    return sum(r.loss for r in records) / len(records) if records else float("nan")

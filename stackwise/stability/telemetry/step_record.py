"""StepRecord: what a training step leaves behind, and the buffer it waits in until the host reads it.

Shapes: P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stackwise.stability.telemetry.gradient_norm import first_non_finite
from stackwise.stability.telemetry.ring_buffer import RingBuffer
from stackwise.support.arguments import require

__all__ = ["StepBuffer", "StepRecord", "mean_loss"]


@dataclass(frozen=True)
class StepRecord:
    """One training step.

    Attributes:
        step: counted from 0.
        loss: in nats, before the update; of the trainer NaN where nothing was predicted.
        grad_norm: global L2 norm of the gradient, before clipping.
        lr: learning rate of the update.
        skipped: whether the update was left out.
        tokens: what the step was trained on, padding as well; None: not counted.
        parameter_norms: L2 norm of each parameter's gradient by name; None: not kept.
        unit: what was trained, of the trainer "rack", "stack 0" or "stack 0 block 1"; None: not said.
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
        """Name of the first parameter with a non-finite gradient; None: none, or norms were not kept."""
        return first_non_finite(self.parameter_norms)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, without what was not kept."""
        return {key: value for key, value in asdict(self).items() if value is not None}


class _Known(NamedTuple):
    """What the host knows of a step as it starts it."""

    step: int
    lr: float
    tokens: int | None
    names: tuple[str, ...] | None
    unit: str | None


class StepBuffer:
    """Rows of a step's numbers, written on the device and read by the host when they have arrived.

    Args:
        capacity: rows until some must be read.
        device: where the numbers are computed.
        n_norms: the most norms that a row may hold, P at most.

    Raises:
        ValueError: no room for a row.
    """

    def __init__(self, capacity: int, device: torch.device, n_norms: int = 0) -> None:
        require(n_norms >= 0, "n_norms", n_norms, "an integer >= 0")
        self._n_norms = n_norms
        self._rows: RingBuffer[_Known] = RingBuffer(capacity, 3 + n_norms, device)

    def __len__(self) -> int:
        """Rows that were not read."""
        return len(self._rows)

    @property
    def full(self) -> bool:
        """Whether the next `write` needs a `drain` first, or another call that finds something."""
        return self._rows.full

    def write(
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
            step: counted from 0.
            lr: learning rate.
            loss: scalar.
            grad_norm: scalar.
            skipped: scalar, boolean.
            tokens: how many the step was trained on.
            unit: what trained.
            norms_P: of the gradients of `names`.
            names: one for each of `norms_P`.

        Raises:
            ValueError: more norms than the buffer has room for, or not as many as names.
        """
        if norms_P is not None:
            found = len(norms_P)
            require(found <= self._n_norms, "norms_P", found, f"at most n_norms={self._n_norms}")
            require(names is not None and len(names) == found, "names", names, f"{found} names")
        known = _Known(step, lr, tokens, names if norms_P is not None else None, unit)
        self._rows.write(known, (loss, grad_norm, skipped), norms_P)

    def poll(self) -> list[StepRecord]:
        """Records that have arrived since the last call. The host does not wait."""
        return [_record(known, row) for known, row in self._rows.poll()]

    @property
    def is_ahead(self) -> bool:
        """Whether what `previous` gives next was there before: on the CPU never. The host does not wait."""
        return self._rows.is_ahead

    def previous(self) -> list[StepRecord]:
        """Records that were there at the last call of any of these three; on the CPU all.

        The same in several processes. The host waits for these alone.
        """
        return [_record(known, row) for known, row in self._rows.previous()]

    def drain(self) -> list[StepRecord]:
        """Every record since the last call. Waits for the device."""
        return [_record(known, row) for known, row in self._rows.drain()]


def _record(known: _Known, row: list[float]) -> StepRecord:
    loss, grad_norm, skipped, *norms = row
    named = None if known.names is None else dict(zip(known.names, norms, strict=False))
    return StepRecord(known.step, loss, grad_norm, known.lr, bool(skipped), known.tokens, named, known.unit)


def mean_loss(records: Sequence[StepRecord]) -> float:
    """Mean loss in nats; NaN for no records."""
    return sum(r.loss for r in records) / len(records) if records else float("nan")

"""Telemetry: what a training step leaves behind, without making the host wait for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["StepBuffer", "StepRecord", "global_norm", "gradient_norms", "mean_loss", "norm_by_rows"]


@dataclass(frozen=True)
class StepRecord:
    """One training step.

    Attributes:
        step: counted from 0.
        loss: in nats, before the update.
        grad_norm: global L2 norm of the gradient, before clipping.
        lr: learning rate of the update.
        skipped: whether the update was left out.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def gradient_norms(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm of every gradient, float32, on the gradients' device: (number of gradients,).

    Parameters without a gradient are left out. One fused kernel group, no host synchronisation.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(0)
    gradients = [torch.view_as_real(g) if g.is_complex() else g for g in gradients]
    wide = any(g.dtype == torch.float64 for g in gradients)
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float64 if wide else torch.float32)
    return torch.stack(norms).float()


def global_norm(norms: Tensor) -> Tensor:
    """The norm of all gradients as one vector: the root of the sum of squares, not the sum of norms."""
    total: Tensor = torch.linalg.vector_norm(norms)
    return total


def norm_by_rows(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all `gradients` as one vector, float32: to be compiled into one pass over them.

    Summed first along rows, which in float32 is a hundred times as exact for large matrices as one sum.
    Uncompiled, `gradient_norms` holds fewer copies.
    """
    squares = [g.to(torch.promote_types(g.dtype, torch.float32)).square() for g in gradients]
    norm: Tensor = torch.stack([(s.sum(-1) if s.ndim else s).sum().sqrt() for s in squares]).norm()
    return norm.float()


class StepBuffer:
    """Rows of a step's scalars, written on the device and read by the host many at a time.

    Args:
        capacity: rows until `drain` must be called.
        device: where the scalars are computed.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._rows = torch.zeros(capacity, 3, device=device)
        self._host: list[tuple[int, float]] = []

    @property
    def full(self) -> bool:
        """Whether the next `write` needs a `drain` first."""
        return len(self._host) == len(self._rows)

    @torch.no_grad()
    def write(self, step: int, lr: float, *, loss: Tensor, grad_norm: Tensor, skipped: Tensor) -> None:
        """Queue one row; each tensor is a scalar. The host does not wait."""
        assert not self.full, "drain() first"
        self._rows[len(self._host)] = torch.stack([loss.float(), grad_norm.float(), skipped.float()])
        self._host.append((step, lr))

    def drain(self) -> list[StepRecord]:
        """Every row since the last call, with one copy to the host."""
        rows = self._rows[: len(self._host)].tolist()
        records = [
            StepRecord(step, loss, grad_norm, lr, bool(skipped))
            for (step, lr), (loss, grad_norm, skipped) in zip(self._host, rows, strict=True)
        ]
        self._host.clear()
        return records


def mean_loss(records: Sequence[StepRecord]) -> float:
    """Mean loss in nats; NaN for no records."""
    return sum(r.loss for r in records) / len(records) if records else float("nan")

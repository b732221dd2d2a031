"""LossTracker: where the loss has been, kept on the device.

Shapes: W losses of the window.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stackwise.stability.telemetry.ring_buffer import RingBuffer
from stackwise.support.arguments import check_number, check_sizes, require

__all__ = ["LossRecord", "LossState", "LossTracker", "bits_per_byte", "perplexity"]


class LossState(NamedTuple):
    """One loss among those before it: float32 scalars on the device. Non-finite losses count in none of them.

    Attributes:
        loss: as observed.
        mean: of the finite losses of the window, this one included; NaN: there is none.
        smoothed: exponential moving average, corrected for its start; NaN: no finite loss yet.
        best: the lowest so far; infinite: no finite loss yet.
        z_score: (loss - mean) / standard deviation (n - 1) of the window before this loss. NaN: there are
            fewer than two, or all are equal; infinite: they were all equal and this one differs.
        finite: 1 or 0.
    """

    loss: Tensor
    mean: Tensor
    smoothed: Tensor
    best: Tensor
    z_score: Tensor
    finite: Tensor


@dataclass(frozen=True)
class LossRecord:
    """`LossState` on the host, with its step."""

    step: int
    loss: float
    mean: float
    smoothed: float
    best: float
    z_score: float
    finite: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class LossTracker:
    """Window mean, moving average, lowest value and z-score of a loss, without making the host wait.

    The z-score is a figure and no verdict: what counts as a spike is for whoever reads it.

    Args:
        window: how many of the last losses the mean and the z-score are of.
        decay: of the moving average, per loss.
        capacity: losses that may be under way to the host. What has arrived is kept until it is read.

    Raises:
        ValueError: a window or capacity below 2, or a decay outside [0, 1).
    """

    def __init__(self, *, window: int = 100, decay: float = 0.98, capacity: int = 64) -> None:
        check_sizes(minimum=2, window=window, capacity=capacity)
        check_number("decay", decay, "0 <= decay < 1", lambda d: 0.0 <= d < 1.0)
        self._window, self._decay, self._capacity = window, decay, capacity
        self._rows: RingBuffer[int] | None = None
        self._unread: list[LossRecord] = []
        self._observed = 0
        self._next_step = 0

    @torch.no_grad()
    def observe(self, loss: Tensor, step: int | None = None) -> LossState:
        """Add a loss.

        Args:
            loss: in nats, a tensor of one element, on the device that computed it. It may have a graph.
            step: number of the record; None: one more than before.

        Raises:
            ValueError: more than one element.
        """
        require(loss.numel() == 1, "loss", tuple(loss.shape), "one element")
        step = self._next_step if step is None else step
        self._next_step = step + 1
        loss = loss.detach().reshape(()).float()
        if self._rows is None:
            self._start(loss.device)
        assert self._rows is not None
        state = self._updated(loss)
        if 2 * len(self._rows) >= self._rows.capacity:
            self._keep(self._rows.poll())
        if self._rows.full:  # the device is `capacity` steps behind
            self._keep(self._rows.drain())
        self._rows.write(step, state)
        return state

    def records(self) -> list[LossRecord]:
        """Records that have arrived since the last call, oldest first. The host does not wait."""
        if self._rows is not None:
            self._keep(self._rows.poll())
        return self._hand_out()

    def drain(self) -> list[LossRecord]:
        """Every record since the last call. Waits for the device."""
        if self._rows is not None:
            self._keep(self._rows.drain())
        return self._hand_out()

    def _start(self, device: torch.device) -> None:
        self._rows = RingBuffer(self._capacity, len(LossState._fields), device)
        self._losses_W = torch.full((self._window,), math.nan, device=device)
        self._sum = torch.zeros((), device=device)
        self._weight = torch.zeros((), device=device)
        self._best = torch.full((), math.inf, device=device)

    def _updated(self, loss: Tensor) -> LossState:
        finite = loss.isfinite()
        mean_before, count_before = _mean(self._losses_W)
        deviations_W = torch.where(self._losses_W.isfinite(), self._losses_W - mean_before, 0.0)
        # Of one loss: 0 / 0.
        deviation = (deviations_W.square().sum() / (count_before - 1)).sqrt()
        self._losses_W[self._observed % self._window] = loss
        self._observed += 1
        share = finite.float() * (1 - self._decay)
        self._sum = torch.where(finite, self._decay * self._sum + share * loss, self._sum)
        self._weight = torch.where(finite, self._decay * self._weight + share, self._weight)
        self._best = torch.where(finite, torch.minimum(self._best, loss), self._best)
        return LossState(
            loss=loss.clone(),
            mean=_mean(self._losses_W)[0],
            smoothed=self._sum / self._weight,
            best=self._best,
            z_score=(loss - mean_before) / deviation,
            finite=finite.float(),
        )

    def _keep(self, rows: list[tuple[int, list[float]]]) -> None:
        for step, (loss, mean, smoothed, best, z_score, finite) in rows:
            self._unread.append(LossRecord(step, loss, mean, smoothed, best, z_score, bool(finite)))

    def _hand_out(self) -> list[LossRecord]:
        records, self._unread = self._unread, []
        return records


def _mean(losses_W: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and number of the finite ones."""
    finite_W = losses_W.isfinite()
    count = finite_W.sum()
    # Summed from one of them on: the mean of equal numbers is that number, in float32 as well.
    largest = torch.where(finite_W, losses_W, -math.inf).amax()
    return largest + torch.where(finite_W, losses_W - largest, 0.0).sum() / count, count


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats per token; infinite where that is beyond a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bits_per_byte(loss: float, tokens: int, n_bytes: int) -> float:
    """A mean loss in nats per token as bits per byte of the text, which no tokenizer changes.

    Args:
        loss: mean over `tokens`.
        tokens: how many the text has.
        n_bytes: how many bytes it has in UTF-8.

    Raises:
        ValueError: no tokens or no bytes.
    """
    check_sizes(tokens=tokens, n_bytes=n_bytes)
    return loss * tokens / (math.log(2.0) * n_bytes)

"""LossTracker: statistics of the loss over training, stored on the device.

Shapes: W losses of the window.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stackwise.stability.telemetry.ring_buffer import Recorder
from stackwise.support.arguments import check_number, check_sizes, require

__all__ = ["LossRecord", "LossState", "LossTracker", "bits_per_byte", "perplexity"]


class LossState(NamedTuple):
    """Loss of one step and statistics of the losses up to it: float32 scalars on the device.

    Non-finite losses are excluded from all statistics.

    Attributes:
        loss: observed loss.
        mean: mean of the finite losses of the window, including this one. NaN if there are none.
        smoothed: exponential moving average with bias correction. NaN before the first finite loss.
        best: lowest loss so far. Infinite before the first finite loss.
        z_score: (loss - mean) / standard deviation (n - 1) of the window before this loss. NaN if the window
            has fewer than two losses, or if all losses are equal. Infinite if they were equal and this one
            differs.
        finite: 1 if the loss is finite, otherwise 0.
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
        """Return plain values, for JSON."""
        return asdict(self)


class LossTracker(Recorder[int, LossRecord]):
    """Window mean, moving average, minimum and z-score of a loss. The host does not wait for the device.

    The z-score is only reported. It is not compared with a limit.

    Args:
        window: number of recent losses for the mean and the z-score.
        decay: decay of the moving average per loss.
        capacity: maximum number of losses that have not arrived at the host. Arrived records are stored until
            they are read.

    Raises:
        ValueError: a window or capacity below 2, or a decay outside [0, 1).
    """

    def __init__(self, *, window: int = 100, decay: float = 0.98, capacity: int = 64) -> None:
        check_sizes(minimum=2, window=window, capacity=capacity)
        check_number("decay", decay, "0 <= decay < 1", lambda d: 0.0 <= d < 1.0)
        super().__init__(capacity, len(LossState._fields))
        self._window, self._decay = window, decay
        self._observed = 0

    @torch.no_grad()
    def observe(self, loss: Tensor, step: int | None = None) -> LossState:
        """Add a loss.

        Args:
            loss: loss in nats, a tensor of one element, on the device that computed it. It may have a graph.
            step: number of the record. None: previous number plus one.

        Raises:
            ValueError: `loss` has more than one element.
        """
        require(loss.numel() == 1, "loss", tuple(loss.shape), "one element")
        loss = loss.detach().reshape(()).float()
        if not self._observed:
            self._start(loss.device)
        state = self._updated(loss)
        self._write(self._number(step), state)
        return state

    def _start(self, device: torch.device) -> None:
        self._losses_W = torch.full((self._window,), math.nan, device=device)
        self._sum = torch.zeros((), device=device)
        self._weight = torch.zeros((), device=device)
        self._best = torch.full((), math.inf, device=device)

    def _updated(self, loss: Tensor) -> LossState:
        finite = loss.isfinite()
        mean_before, count_before = _mean(self._losses_W)
        deviations_W = torch.where(self._losses_W.isfinite(), self._losses_W - mean_before, 0.0)
        # A window with one loss has a deviation of 0 / 0.
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

    def _record(self, tag: int, row: list[float]) -> LossRecord:
        loss, mean, smoothed, best, z_score, finite = row
        return LossRecord(tag, loss, mean, smoothed, best, z_score, bool(finite))


def _mean(losses_W: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the number of the finite losses."""
    finite_W = losses_W.isfinite()
    count = finite_W.sum()
    # Sums of differences from one loss, so that the mean of equal losses is exact in float32.
    largest = torch.where(finite_W, losses_W, -math.inf).amax()
    return largest + torch.where(finite_W, losses_W - largest, 0.0).sum() / count, count


def perplexity(loss: float) -> float:
    """Return exp of a mean loss in nats per token. Return infinity if it exceeds the range of a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bits_per_byte(loss: float, tokens: int, n_bytes: int) -> float:
    """Return a mean loss in nats per token as bits per byte of text, which does not depend on the tokenizer.

    Args:
        loss: mean loss over `tokens`.
        tokens: number of tokens of the text.
        n_bytes: number of bytes of the text in UTF-8.

    Raises:
        ValueError: no tokens or no bytes.
    """
    check_sizes(tokens=tokens, n_bytes=n_bytes)
    return loss * tokens / (math.log(2.0) * n_bytes)

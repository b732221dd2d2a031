"""LogitBound: upper bound of attention logits from the norms of queries and keys.

Shapes: ... any, H query heads, K key/value heads, T queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.linalg import vector_norm

__all__ = ["LogitBound", "note_logits", "watch", "watching"]

_HIDDEN = -5e3  # a lower score is a constant that masks a key

_watching: LogitBound | None = None


class LogitBound:
    """Largest |scale| * ||query|| * ||key|| over all recorded attentions.

    No logit exceeds the bound (Cauchy-Schwarz). It works with fused kernels, because it only reads queries
    and keys. It excludes soft caps and additive biases, and includes masked keys. It stays on the device.

    Args:
        device: device of the queries and keys. The bound moves if they are on another one.

    Attributes:
        seen: True if an attention was recorded since the last `take`.
    """

    def __init__(self, device: torch.device) -> None:
        self._largest = torch.zeros((), device=device)
        self.seen = False

    def to(self, device: torch.device) -> None:
        """Move to `device`."""
        self._largest = self._largest.to(device)

    @torch.no_grad()
    def note(self, q_HTD: Tensor, k_KSD: Tensor, scale: float | None = None) -> None:
        """Record the queries and keys of one attention. Empty, nested and distributed tensors are ignored.

        Args:
            q_HTD: queries, (..., H, T, D) or (T, D).
            k_KSD: keys, (..., K, S, D). H is a multiple of K, and query head h reads key head h // (H/K).
            scale: factor of the logits. None: D^-1/2.
        """
        if not (_is_readable(q_HTD) and _is_readable(k_KSD)):
            return
        scale = q_HTD.shape[-1] ** -0.5 if scale is None else abs(scale)
        q_H, k_K = _longest(q_HTD), _longest(k_KSD)
        if q_H.ndim and k_K.ndim and 1 < k_K.shape[-1] < q_H.shape[-1]:
            k_K = k_K.repeat_interleave(q_H.shape[-1] // k_K.shape[-1], dim=-1)
        self._see(scale * (q_H * k_K).amax())

    @torch.no_grad()
    def note_scores(self, scores: Tensor, axis: int = -1) -> None:
        """Record logits that were computed.

        For each query, take the maximum logit; record the largest absolute value of these. A maximum below
        -5000 is ignored: all keys of the query are masked.

        Args:
            scores: argument of the softmax, of any shape.
            axis: axis of the keys.
        """
        if not _is_readable(scores):
            return
        of_queries = scores.detach().amax(axis)
        self._see(of_queries.masked_fill(of_queries < _HIDDEN, 0.0).abs().amax())

    def _see(self, largest: Tensor) -> None:
        if self._largest.device != largest.device:
            self.to(largest.device)
        self._largest.copy_(torch.maximum(self._largest, largest.float()))
        self.seen = True

    def take(self) -> Tensor:
        """Return and reset the bound: float32 scalar tensor, NaN if nothing was recorded."""
        largest = torch.where(self._largest == 0, torch.nan, self._largest)
        self._largest.zero_()
        self.seen = False
        return largest


def _is_readable(x: Tensor) -> bool:
    """Return True for a non-empty dense tensor of floating-point numbers, on one device."""
    whole = x.layout == torch.strided and not x.is_nested and not hasattr(x, "to_local")
    return whole and x.is_floating_point() and x.ndim > 1 and x.numel() > 0


def _longest(x_TD: Tensor) -> Tensor:
    """Return the largest L2 norm over the positions of (..., T, D), in float32 or float64."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    norms_T: Tensor = vector_norm(x_TD, dim=-1, dtype=wide)
    return norms_T.amax(-1)


def watch(bound: LogitBound | None, instead_of: LogitBound | None = None) -> LogitBound | None:
    """Record all attentions with gradients in `bound` from now on.

    Args:
        bound: the bound. None: record nothing.
        instead_of: if given, replace the bound only if `instead_of` is the current one.

    Returns:
        the bound that was used before.
    """
    global _watching
    before = _watching
    if instead_of is None or instead_of is before:
        _watching = bound
    return before


@contextmanager
def watching(bound: LogitBound | None) -> Iterator[None]:
    """Record attentions with gradients in `bound` within the block. None: record nothing."""
    before = watch(bound)
    try:
        yield
    finally:
        watch(before)


def note_logits(q_HTD: Tensor, k_KSD: Tensor, scale: float | None) -> None:
    """Record queries and keys in the current bound, if they require gradients."""
    if _watching is not None and (q_HTD.requires_grad or k_KSD.requires_grad):
        _watching.note(q_HTD.detach(), k_KSD.detach(), scale)

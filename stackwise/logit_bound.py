"""LogitBound: what the logits of attention are at most, without computing any of them.

Shapes: ... any, H query heads, K key/value heads, T queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.linalg import vector_norm

__all__ = ["LogitBound", "note_logits", "watching"]

_watching: LogitBound | None = None


class LogitBound:
    """The largest of |scale| times the norm of a query times that of a key, over all that was seen.

    No logit is larger (Cauchy-Schwarz), and with the weights of queries and keys both grow alike. It is taken
    before a soft cap, of all keys, hidden or not, and takes two passes over queries and keys: fused kernels,
    which never write logits down, stay as they are. It stays on the device.

    Args:
        device: of the queries and keys.
    """

    def __init__(self, device: torch.device) -> None:
        self._largest = torch.zeros((), device=device)

    @torch.no_grad()
    def note(self, q_HTD: Tensor, k_KSD: Tensor, scale: float | None = None) -> None:
        """See queries and keys of one attention.

        Args:
            q_HTD: queries, (..., H, T, D).
            k_KSD: keys, (..., K, S, D); H is a multiple of K, and query head h reads key head h // (H/K).
            scale: of the logits; None: D^-1/2.
        """
        scale = q_HTD.shape[-1] ** -0.5 if scale is None else abs(scale)
        q_H = vector_norm(q_HTD, dim=-1, dtype=torch.float32).amax(-1)
        k_K = vector_norm(k_KSD, dim=-1, dtype=torch.float32).amax(-1)
        if 1 < k_K.shape[-1] < q_H.shape[-1]:
            k_K = k_K.repeat_interleave(q_H.shape[-1] // k_K.shape[-1], dim=-1)
        self._see(scale * (q_H * k_K).amax())

    @torch.no_grad()
    def note_scores(self, scores: Tensor) -> None:
        """See logits that are written down: the largest of them, which takes no bound; -inf is no logit.

        Args:
            scores: what a softmax takes, of any shape.
        """
        self._see(scores.detach().amax().float())

    def _see(self, largest: Tensor) -> None:
        self._largest.copy_(torch.maximum(self._largest, largest.to(self._largest.device)))

    def take(self) -> Tensor:
        """The bound of all that was noted since the last call, float32 of no dimension; NaN: nothing was."""
        largest = torch.where(self._largest == 0, torch.nan, self._largest)
        self._largest.zero_()
        return largest


@contextmanager
def watching(bound: LogitBound | None) -> Iterator[None]:
    """Attention that is trained is noted in `bound` meanwhile; None: it is not."""
    global _watching
    before, _watching = _watching, bound
    try:
        yield
    finally:
        _watching = before


def note_logits(q_HTD: Tensor, k_KSD: Tensor, scale: float | None) -> None:
    """Tell whoever is watching of queries and keys that gradients come back to."""
    if _watching is not None and (q_HTD.requires_grad or k_KSD.requires_grad):
        _watching.note(q_HTD.detach(), k_KSD.detach(), scale)

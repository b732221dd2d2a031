"""LogitBound: what the logits of attention are at most, without computing any of them.

Shapes: ... any, H query heads, K key/value heads, T queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.linalg import vector_norm

__all__ = ["LogitBound", "note_logits", "watch", "watching"]

_HIDDEN = -5e3  # what is below is no logit, but a constant that hides a key

_watching: LogitBound | None = None


class LogitBound:
    """The largest of |scale| times the norm of a query times that of a key, over all that was seen.

    No logit is larger (Cauchy-Schwarz), and with the weights of queries and keys both grow alike. It is taken
    before a soft cap and before a bias that is added, of all keys, hidden or not, and takes a pass over
    queries and keys: fused kernels, which never write logits down, stay as they are. It stays on the device.

    Args:
        device: of the queries and keys; where they are elsewhere, it goes there.

    Attributes:
        seen: whether anything was noted since `take`, also where that was zero.
    """

    def __init__(self, device: torch.device) -> None:
        self._largest = torch.zeros((), device=device)
        self.seen = False

    def to(self, device: torch.device) -> None:
        """Stay on `device` from here on."""
        self._largest = self._largest.to(device)

    @torch.no_grad()
    def note(self, q_HTD: Tensor, k_KSD: Tensor, scale: float | None = None) -> None:
        """See queries and keys of one attention; what has no numbers that could be read is passed over.

        Args:
            q_HTD: queries, (..., H, T, D) or (T, D).
            k_KSD: keys, (..., K, S, D); H is a multiple of K, and query head h reads key head h // (H/K).
            scale: of the logits; None: D^-1/2.
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
        """See logits that are written down, which takes no bound.

        Of each query it is the largest, and of these the largest absolute value. What is below -5000, as keys
        that a constant hides, is no logit.

        Args:
            scores: what a softmax takes, of any shape.
            axis: of the keys.
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
        """The bound of all that was noted since the last call, float32 of no dimension; NaN: nothing was."""
        largest = torch.where(self._largest == 0, torch.nan, self._largest)
        self._largest.zero_()
        self.seen = False
        return largest


def _is_readable(x: Tensor) -> bool:
    """Whether norms can be taken of it: some numbers, in one piece."""
    whole = x.layout == torch.strided and not x.is_nested and not hasattr(x, "to_local")
    return whole and x.is_floating_point() and x.ndim > 1 and x.numel() > 0


def _longest(x_TD: Tensor) -> Tensor:
    """The largest L2 norm over the positions of (..., T, D), in float32 or better."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    norms_T: Tensor = vector_norm(x_TD, dim=-1, dtype=wide)
    return norms_T.amax(-1)


def watch(bound: LogitBound | None, instead_of: LogitBound | None = None) -> LogitBound | None:
    """Attention that is trained is noted in `bound` from now on; None: it is not.

    Args:
        bound: takes it.
        instead_of: where it is given and another one watches, that one stays.

    Returns:
        who watched until now.
    """
    global _watching
    before = _watching
    if instead_of is None or instead_of is before:
        _watching = bound
    return before


@contextmanager
def watching(bound: LogitBound | None) -> Iterator[None]:
    """Attention that is trained is noted in `bound` meanwhile; None: it is not."""
    before = watch(bound)
    try:
        yield
    finally:
        watch(before)


def note_logits(q_HTD: Tensor, k_KSD: Tensor, scale: float | None) -> None:
    """Tell whoever is watching of queries and keys that gradients come back to."""
    if _watching is not None and (q_HTD.requires_grad or k_KSD.requires_grad):
        _watching.note(q_HTD.detach(), k_KSD.detach(), scale)

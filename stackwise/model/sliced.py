"""Sliced attention: softmax attention by plain matrix products, without keys that no query can see.

Shapes: B batch, H query heads, K key/value heads, T queries, S keys, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stackwise.model.mask import AttentionMask

__all__ = ["sliced_attention"]

QUERIES_PER_SLICE = 64
MAX_SLICES = 16  # more parts slow the compilation down, and a slice then has enough rows


def sliced_attention(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask: AttentionMask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute `backend.attend` one slice of queries at a time, with only the keys that the slice may see.

    Arguments and result are as in `backend.attend`. Keys hidden by causality and window are skipped. Query
    heads of one key/value head share a plain matrix product.
    """
    B, H, T, D = q_BHTD.shape
    K = k_BKSD.shape[1]
    if T == 0:
        return q_BHTD.new_empty(B, H, 0, v_BKSD.shape[-1])
    scale = D**-0.5 if scale is None else scale
    rows = -(-T // MAX_SLICES)
    if mask.window is not None and not torch.compiler.is_compiling():
        rows = min(rows, mask.window)  # about half of a slice's keys are then visible
    rows = max(QUERIES_PER_SLICE, rows)
    slices = []
    for start in range(0, T, rows):
        end = min(start + rows, T)
        first, last = mask.key_range(start, end)
        q = (q_BHTD[:, :, start:end] * scale).reshape(B, K, H // K * (end - start), D)
        logits = q @ k_BKSD[:, :, first:last].transpose(-1, -2)
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        visible = mask.visible(slice(start, end), slice(first, last))
        if visible is not None:
            logits = (
                logits.view(B, H, end - start, last - first)
                .masked_fill(~visible, float("-inf"))
                .view_as(logits)
            )
        y = _mean(logits, v_BKSD[:, :, first:last], dropout)
        slices.append(y.view(B, H, end - start, v_BKSD.shape[-1]))
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim=2)


def _mean(logits_BKRS: Tensor, v_BKSD: Tensor, dropout: float) -> Tensor:
    """Return softmax(logits) v, in the dtype of the logits; R is the queries of all heads sharing keys."""
    if logits_BKRS.dtype == torch.float16:  # a sum over many keys would exceed its maximum, 65504
        weights = logits_BKRS.softmax(-1)
        return (F.dropout(weights, dropout) if dropout else weights) @ v_BKSD
    # The division by the sum follows the product: this saves one pass over the weights, and their
    # rounding to bfloat16 cancels.
    wide = logits_BKRS.to(torch.promote_types(logits_BKRS.dtype, torch.float32))
    weights = (wide - wide.detach().amax(-1, keepdim=True)).exp().to(logits_BKRS.dtype)
    total = weights.sum(-1, keepdim=True, dtype=wide.dtype)
    if dropout:
        weights = F.dropout(weights, dropout)
    return ((weights @ v_BKSD) / total).to(logits_BKRS.dtype)

"""Backends: the ways to compute softmax attention, and which one is taken.

Shapes: B batch, H query heads, K key/value heads, G = H/K, T queries, S keys, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stackwise.model.mask import AttentionMask

__all__ = ["attend"]

QUERIES_PER_SLICE = 128


def attend(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    mask: AttentionMask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scale * q k^T, over the visible keys) v, each query head with key/value head h // G.

    Args:
        q_BHTD: queries.
        k_BKSD: keys.
        v_BKSD: values; D may differ from that of queries and keys.
        mask: who sees whom.
        scale: default D^-1/2.
        softcap: c bounds the logits by c * tanh(logit / c), as in Gemma 2 (arXiv:2408.00118).
        dropout: probability on the attention weights.

    Returns:
        (B, H, T, D of the values).
    """
    if softcap is not None:
        return sliced_attention(q_BHTD, k_BKSD, v_BKSD, mask, scale=scale, softcap=softcap, dropout=dropout)
    return F.scaled_dot_product_attention(
        q_BHTD,
        k_BKSD,
        v_BKSD,
        attn_mask=None if mask.is_lower_triangle else mask.dense(),
        dropout_p=dropout,
        is_causal=mask.is_lower_triangle,
        scale=scale,
        enable_gqa=q_BHTD.shape[1] != k_BKSD.shape[1],
    )


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
    """Arguments and result as `attend`: a slice of queries at a time, with only the keys it may see.

    What causality and window hide is not computed, and what is computed are plain matrix products;
    query heads of one key/value head share a product.
    """
    B, H, T, D = q_BHTD.shape
    K = k_BKSD.shape[1]
    scale = D**-0.5 if scale is None else scale
    slices = []
    for start in range(0, T, QUERIES_PER_SLICE):
        end = min(start + QUERIES_PER_SLICE, T)
        first, last = mask.key_range(start, end)
        q = (q_BHTD[:, :, start:end] * scale).reshape(B, K, -1, D)
        logits = q @ k_BKSD[:, :, first:last].transpose(-1, -2)
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        visible = mask.visible(slice(start, end), slice(first, last))
        if visible is not None:
            logits = logits.view(B, H, end - start, -1).masked_fill(~visible, float("-inf")).view_as(logits)
        weights = logits.softmax(-1)
        if dropout:
            weights = F.dropout(weights, dropout)
        slices.append((weights @ v_BKSD[:, :, first:last]).view(B, H, end - start, -1))
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim=2)

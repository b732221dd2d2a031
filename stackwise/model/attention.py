"""Attention: multi-head and grouped-query, causal or bidirectional, full or windowed.

Shapes: B batch, T positions, C model width, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.model.layout import Layout
from stackwise.model.rotary import rotate

__all__ = ["Attention"]


class Attention(nn.Module):
    """Softmax attention through `scaled_dot_product_attention`, one fused projection for q, k, v.

    Grouped queries (Ainslie et al. 2023, arXiv:2305.13245): query head h reads key/value head
    h // (H/K). With K == H this is ordinary multi-head attention.

    Args:
        d_model: C; a multiple of `n_heads`.
        n_heads: H; a multiple of `n_kv_heads`.
        n_kv_heads: K.
        causal: hide the positions after the query.
        sliding_window: W; a query sees positions closer than W, itself included; None for all.
        dropout: probability on the attention weights and on the output, in training mode.
        rope_theta: base of the rotary frequencies; None for no positions.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        *,
        causal: bool = True,
        sliding_window: int | None = None,
        dropout: float = 0.0,
        rope_theta: float | None = 10_000.0,
    ) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, d_model // n_heads
        self.causal, self.sliding_window = causal, sliding_window
        self.dropout, self.rope_theta = dropout, rope_theta
        self.qkv = nn.Linear(d_model, (n_heads + 2 * n_kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x_BTC: Tensor, layout: Layout) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        B, T, _ = x_BTC.shape
        heads = self.qkv(x_BTC).view(B, T, self.n_heads + 2 * self.n_kv_heads, self.head_dim).transpose(1, 2)
        q_BHTD, k_BKTD, v_BKTD = heads.split((self.n_heads, self.n_kv_heads, self.n_kv_heads), dim=1)
        if self.rope_theta is not None:
            cos, sin = layout.rotary(self.head_dim, self.rope_theta)
            q_BHTD, k_BKTD = rotate(q_BHTD, cos, sin), rotate(k_BKTD, cos, sin)
        mask = layout.mask(causal=self.causal, window=self.sliding_window)
        y_BHTD = F.scaled_dot_product_attention(
            q_BHTD,
            k_BKTD,
            v_BKTD,
            attn_mask=mask.bias_BTS,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask.is_causal,
            enable_gqa=self.n_kv_heads != self.n_heads,
        )
        y_BTC = self.out(y_BHTD.transpose(1, 2).reshape(x_BTC.shape))
        return F.dropout(y_BTC, self.dropout, self.training)

    def extra_repr(self) -> str:  # noqa: D102
        return (
            f"n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}, causal={self.causal}, "
            f"sliding_window={self.sliding_window}, rope_theta={self.rope_theta}"
        )

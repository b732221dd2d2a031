"""Attention: multi-head, grouped-query and multi-query, causal or bidirectional, full or windowed.

Shapes: B batch, T positions, S positions with the cached ones, C model width, H query heads,
K key/value heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.config import BlockConfig
from stackwise.model.backend import attend
from stackwise.model.cache import BlockCache, SlotCache
from stackwise.model.layout import Layout
from stackwise.model.linear import Linear
from stackwise.model.norm import RMSNorm
from stackwise.model.rotary import Rotary, rotate

__all__ = ["Attention", "rotary_of"]


class Attention(nn.Module):
    """Softmax attention with one fused projection for queries, keys and values.

    Grouped queries (Ainslie et al. 2023, arXiv:2305.13245): query head h reads key/value head h // (H/K).
    With K == H this is multi-head attention, with K == 1 multi-query attention.

    Args:
        config: configuration of the Block.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.n_kv_heads = 1 if config.attention_type == "mqa" else config.n_kv_heads or config.n_heads
        self.head_dim = config.head_dim or config.d_model // config.n_heads
        self.causal, self.sliding_window = config.attention_mode == "causal", config.sliding_window
        self.softcap, self.dropout = config.softcap, config.dropout
        self.backend: str | None = None  # backend of the last forward pass
        self.rotary = rotary_of(config, self.head_dim)
        self.qk_norm = config.qk_norm
        heads = self.n_heads + 2 * self.n_kv_heads
        self.qkv = Linear(config.d_model, heads * self.head_dim, bias=config.qkv_bias)
        self.out = Linear(self.n_heads * self.head_dim, config.d_model, bias=False)
        if config.qk_norm is not None:
            across = (1, 1) if config.qk_norm == "head" else (self.n_heads, self.n_kv_heads)
            self.q_norm = RMSNorm(across[0] * self.head_dim, eps=config.norm_eps)
            self.k_norm = RMSNorm(across[1] * self.head_dim, eps=config.norm_eps)

    def forward(self, x_BTC: Tensor, layout: Layout, cache: BlockCache | None = None) -> Tensor:
        """(B, T, C) -> (B, T, C). With a cache, the T tokens follow the cached ones."""
        q_BHTD, k_BKTD, v_BKTD = self.project(x_BTC, layout)
        keys = None
        if cache is not None:
            assert isinstance(cache, SlotCache)
            (k_BKTD, v_BKTD), keys = cache.append(layout, k_BKTD, v_BKTD)
        y_BHTD, self.backend = attend(
            q_BHTD,
            k_BKTD,
            v_BKTD,
            layout.mask(causal=self.causal, window=self.sliding_window, keys=keys),
            softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0,
        )
        y_BTC = self.out(y_BHTD.transpose(1, 2).flatten(2))
        return F.dropout(y_BTC, self.dropout, self.training)

    def project(self, x_BTC: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, T, D), keys and values (B, K, T, D). Queries and keys are rotated.

        With `qk_norm`, queries and keys are normalised before the rotation.
        """
        sizes = [n * self.head_dim for n in (self.n_heads, self.n_kv_heads, self.n_kv_heads)]
        q, k, v = self.qkv(x_BTC).split(sizes, dim=-1)
        if self.qk_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.rotary is not None:
            cos, sin = layout.rotary(self.rotary)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v

    def new_cache(
        self, batch_size: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> BlockCache:
        """Return a KV cache for `capacity` tokens. With a sliding window it stores at most one window."""
        sizes = [(self.n_kv_heads, self.head_dim)] * 2
        return SlotCache(batch_size, capacity, self.sliding_window, sizes, dtype, device)

    def extra_repr(self) -> str:  # noqa: D102
        return (
            f"n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}, causal={self.causal}, "
            f"sliding_window={self.sliding_window}, rotary={self.rotary}"
        )


def rotary_of(config: BlockConfig, head_dim: int) -> Rotary | None:
    """Return the rotary embedding of a Block for heads of this size; None: no rotation."""
    return Rotary(head_dim, config.rope_theta, config.rope_scaling) if config.use_rope else None

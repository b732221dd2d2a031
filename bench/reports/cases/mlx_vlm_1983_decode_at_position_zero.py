"""mlx-vlm#1983 (Blaizzy/mlx-vlm): Qwen3-Omni decodes every token at rotary position 0.

`get_rope_index` counts positions from 0 in each call and ignores the offset of the cache. The prompt is
right, but each generated token gets position 0. https://github.com/Blaizzy/mlx-vlm/issues/1983
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


@dataclass
class LanguageModelOutput:
    """Logits (batch, time, vocabulary)."""

    logits: Tensor


class KVCache:
    """Keys and values of one layer; `offset` is their number."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.offset = 0

    def update_and_fetch(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys), dim=2), torch.cat((self.values, values), dim=2)
        self.keys, self.values, self.offset = keys, values, keys.shape[2]
        return keys, values


def mrope(x: Tensor, position_ids: Tensor) -> Tensor:
    """Rotate `x` (batch, heads, time, dim) by positions (3, batch, time) of time, height and width."""
    half = x.shape[-1] // 2
    inv_freq = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angle = (position_ids[torch.arange(half) % 3].permute(1, 2, 0).to(x.dtype) * inv_freq)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with norms of queries and keys."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        head_dim = dim // heads
        self.q_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(dim, kv_heads * head_dim, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = nn.RMSNorm(head_dim, eps=1e-6), nn.RMSNorm(head_dim, eps=1e-6)

    def forward(self, x: Tensor, mask: Tensor, cache: KVCache | None, position_ids: Tensor) -> Tensor:
        """`mask` (batch, 1, queries, keys) is True for visible keys."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.q_norm.normalized_shape[0])).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = mrope(self.q_norm(q), position_ids), mrope(self.k_norm(k), position_ids)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """Attention, then an MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.self_attn = Attention(dim, 4, 2)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(dim, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor, cache: KVCache | None, position_ids: Tensor) -> Tensor:
        """One layer."""
        x = x + self.self_attn(self.input_layernorm(x), mask, cache, position_ids)
        return x + self.mlp(self.post_attention_layernorm(x))


class Thinker(nn.Module):
    """Text part of the thinker; images and audio are left out."""

    def __init__(self, *, use_offset: bool, vocab_size: int = 64, dim: int = 32) -> None:
        super().__init__()
        self.use_offset = use_offset
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(DecoderLayer(dim) for _ in range(2))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)

    def make_cache(self) -> list[KVCache]:
        """Return an empty cache for each layer."""
        return [KVCache() for _ in self.layers]

    def get_rope_index(self, input_ids: Tensor, offset: int) -> Tensor:
        """Return positions (3, batch, time) of text."""
        start = offset if self.use_offset else 0
        positions = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)
        return positions.expand(3, *input_ids.shape)

    def forward(
        self, input_ids: Tensor, mask: Tensor | None = None, cache: list[KVCache] | None = None
    ) -> LanguageModelOutput:
        """`mask` (batch, cached and new tokens) is 0 for padding. `cache` is extended in place."""
        offset = 0 if cache is None else cache[0].offset
        position_ids = self.get_rope_index(input_ids, offset)
        queries = (keys := torch.arange(offset + input_ids.shape[1], device=input_ids.device))[offset:, None]
        visible = (queries >= keys)[None]
        if mask is not None:
            visible = visible & (mask.bool()[:, None] | (queries == keys))
        x = self.embed_tokens(input_ids)
        for layer, layer_cache in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            x = layer(x, visible[:, None], layer_cache, position_ids)
        return LanguageModelOutput(self.lm_head(self.norm(x)))


def buggy() -> nn.Module:
    """Positions from 0 in each call."""
    return Thinker(use_offset=False)


def healthy() -> nn.Module:
    """Positions from the offset of the cache."""
    return Thinker(use_offset=True)


def _decode(
    model: nn.Module, ids: Tensor, cache: list[KVCache] | None, keep: Tensor | None = None
) -> tuple[Tensor, list[KVCache]]:
    """Continue a copy of the cache, whose tensors are never changed in place."""
    cache = model.make_cache() if cache is None else [copy.copy(each) for each in cache]
    return model(ids, mask=keep, cache=cache).logits, cache


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model with a cache and padding on both sides."""
    return ModelSpec.of(
        make,
        causal=True,
        decode=_decode,
        masked=lambda model, ids, keep: model(ids, mask=keep).logits,
        padding_sides=("left", "right"),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Logits of tokens decoded one by one after a prompt of 5, minus those of one call."""
    model, ids = model.double().eval(), torch.tensor([[5, 9, 11, 2, 31, 44, 17, 60, 3]])
    cache = model.make_cache()
    steps = [model(part, cache=cache).logits for part in (ids[:, :5], *ids[:, 5:].split(1, dim=1))]
    return torch.cat(steps, dim=1) - model(ids).logits

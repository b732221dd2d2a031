"""mlx-lm#843 (ml-explore/mlx-lm): sliding-window layers of Step-3.5 attend to all tokens while generating.

The helper for masks returns no mask for a single new token, also if a window is given. The caches keep all
tokens, so each generated token sees those before its window. https://github.com/ml-explore/mlx-lm/pull/843
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import Facts, ModelSpec


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


def create_attention_mask(
    h: Tensor, cache: KVCache | None, window_size: int | None, *, window_of_single: bool
) -> Tensor | None:
    """Return a mask (queries, keys), True for visible keys, or None if all are visible."""
    n, offset = h.shape[1], 0 if cache is None else cache.offset
    if n == 1 and (window_size is None or not window_of_single):
        return None
    queries = (keys := torch.arange(offset + n, device=h.device))[offset:, None]
    visible = queries >= keys
    return visible if window_size is None else visible & (queries < keys + window_size)


def rope(x: Tensor, offset: int, base: float) -> Tensor:
    """Rotate `x` (batch, heads, time, dim) by positions that start at `offset`."""
    half = x.shape[-1] // 2
    inv_freq = base ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angle = torch.arange(offset, offset + x.shape[2], device=x.device)[:, None].to(x.dtype) * inv_freq
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention, with a gate for each head."""

    def __init__(self, dim: int, heads: int, kv_heads: int, base: float) -> None:
        super().__init__()
        self.head_dim, self.base = dim // heads, base
        self.q_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(dim, kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, eps=1e-5) for _ in range(2))
        self.g_proj = nn.Linear(dim, heads, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """`x` is (batch, time, dim)."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        offset = 0 if cache is None else cache.offset
        q, k = rope(self.q_norm(q), offset, self.base), rope(self.k_norm(k), offset, self.base)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)
        return self.o_proj((y * self.g_proj(x).sigmoid()[..., None]).flatten(2))


class DecoderLayer(nn.Module):
    """Attention with or without a window, then an MLP."""

    def __init__(self, dim: int, layer_type: str) -> None:
        super().__init__()
        self.is_sliding = layer_type == "sliding_attention"
        self.self_attn = Attention(dim, 4, 2, base=1e4 if self.is_sliding else 1e6)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(dim, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None, cache: KVCache | None) -> Tensor:
        """One layer."""
        x = x + self.self_attn(self.input_layernorm(x), mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass
class ModelArgs:
    """Configuration."""

    hidden_size: int = 32
    sliding_window: int = 6
    layer_types: tuple[str, ...] = ("full_attention", "sliding_attention", "sliding_attention")


class Step3p5(nn.Module):
    """Language model whose layers have full attention or a sliding window."""

    def __init__(self, args: ModelArgs, *, window_of_single: bool) -> None:
        super().__init__()
        self.args, self.window_of_single = args, window_of_single
        self.embed_tokens = nn.Embedding(64, args.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(args.hidden_size, kind) for kind in args.layer_types)
        self.norm = nn.RMSNorm(args.hidden_size, eps=1e-5)
        self.lm_head = nn.Linear(args.hidden_size, 64, bias=False)

    def make_cache(self) -> list[KVCache]:
        """Return an empty cache for each layer."""
        return [KVCache() for _ in self.layers]

    def forward(self, inputs: Tensor, cache: list[KVCache] | None = None) -> Tensor:
        """`inputs` is ids (batch, time); `cache` is extended in place. The result is logits."""
        h = self.embed_tokens(inputs)
        caches = [None] * len(self.layers) if cache is None else cache
        full, sliding = (
            create_attention_mask(h, caches[0], window, window_of_single=self.window_of_single)
            for window in (None, self.args.sliding_window)
        )
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            h = layer(h, sliding if layer.is_sliding else full, layer_cache)
        return self.lm_head(self.norm(h))


def buggy() -> nn.Module:
    """No mask for a single token."""
    return Step3p5(ModelArgs(), window_of_single=False)


def healthy() -> nn.Module:
    """The window holds for a single token, too."""
    return Step3p5(ModelArgs(), window_of_single=True)


def _decode(model: nn.Module, ids: Tensor, cache: list[KVCache] | None) -> tuple[Tensor, list[KVCache]]:
    """Continue a copy of the cache, whose tensors are never changed in place."""
    cache = model.make_cache() if cache is None else [copy.copy(each) for each in cache]
    return model(ids, cache=cache), cache


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model with a cache, and the windows of its layers."""
    return ModelSpec.of(make, causal=True, tied=False, decode=_decode, facts=Facts(windows=(None, 6, 6)))


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Logits of tokens decoded one by one after a prompt of 5, minus those of one call."""
    model = model.double().eval()
    ids, cache = torch.randint(64, (2, 14), generator=torch.Generator().manual_seed(1)), model.make_cache()
    steps = [model(part, cache=cache) for part in (ids[:, :5], *ids[:, 5:].split(1, dim=1))]
    return torch.cat(steps, dim=1) - model(ids)

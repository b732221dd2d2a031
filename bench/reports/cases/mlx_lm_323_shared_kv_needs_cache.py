"""mlx-lm#323 (ml-explore/mlx-lm): Gemma 3n layers that share keys and values do so only with a cache.

Called without a cache, the last layers fall back to key and value projections of their own, so the logits of
a plain forward pass differ from those of cached decoding.
"""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, DIM, HEADS, LAYERS, SHARED = 61, 32, 4, 4, 2


class KVCache:
    """Keys and values of one layer."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.offset = 0

    def update_and_fetch(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append and return everything."""
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 2)
        self.values = values if self.values is None else torch.cat([self.values, values], 2)
        self.offset = self.keys.shape[2]
        return self.keys, self.values


def rope(x: torch.Tensor, offset: int) -> torch.Tensor:
    """Rotate the halves of the last axis."""
    half = x.shape[-1] // 2
    freqs = 10_000 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(offset, offset + x.shape[2], dtype=x.dtype)[:, None] * freqs
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Gemma3nBlock(nn.Module):
    """Attention and gated MLP; `shared` blocks use the keys and values of an earlier block."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.shared = shared
        self.q_proj, self.o_proj = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        # Checkpoints have these for shared blocks too.
        self.k_proj, self.v_proj = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.gate, self.up = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor, offset: int, cache: KVCache | None) -> torch.Tensor:
        """Run one block on (B, T, DIM)."""
        h = self.norm1(x)
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (p(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in projections)
        q = rope(q, offset)
        if self.shared and cache is not None:
            k, v = cache.keys, cache.values
        else:
            k = rope(k, offset)
            k, v = (k, v) if cache is None else cache.update_and_fetch(k, v)
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, visible).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.gate(self.norm2(x))) * self.up(self.norm2(x)))


class Gemma3n(nn.Module):
    """Language model whose last `SHARED` layers reuse the last concrete layer's keys and values."""

    def __init__(self, *, always_cache: bool) -> None:
        super().__init__()
        self.always_cache = always_cache
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Gemma3nBlock(shared=i >= LAYERS - SHARED) for i in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)

    def make_cache(self) -> list[KVCache]:
        """One cache per concrete layer."""
        return [KVCache() for _ in range(LAYERS - SHARED)]

    def forward(self, input_ids: torch.Tensor, cache: list[KVCache] | None = None) -> torch.Tensor:
        """Return logits; `cache` is filled in place."""
        if cache is None:
            cache = self.make_cache() if self.always_cache else [None] * (LAYERS - SHARED)
        offset = cache[0].offset if cache[0] is not None else 0
        x = self.embed_tokens(input_ids) * DIM**0.5
        for i, layer in enumerate(self.layers):
            x = layer(x, offset, cache[min(i, LAYERS - SHARED - 1)])
        return self.norm(x) @ self.embed_tokens.weight.T


def buggy() -> nn.Module:
    """Shared layers project keys and values themselves when there is no cache."""
    return Gemma3n(always_cache=False)


def healthy() -> nn.Module:
    """A cache is made when the caller gives none."""
    return Gemma3n(always_cache=True)


def observe(model: nn.Module) -> torch.Tensor:
    """Difference between one pass without a cache and decoding token by token."""
    model = model.double().eval()
    ids = torch.arange(2 * 9).view(2, 9) * 7 % VOCAB
    cache = model.make_cache()
    with torch.no_grad():
        steps = torch.cat([model(ids[:, i : i + 1], cache=cache) for i in range(ids.shape[1])], 1)
        return model(ids) - steps

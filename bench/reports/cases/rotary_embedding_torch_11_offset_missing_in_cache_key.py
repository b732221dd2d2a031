"""rotary-embedding-torch#11 (lucidrains/rotary-embedding-torch): cached frequencies ignore the offset.

The table of angles is kept under the key `freqs:{seq_len}`. A call with the same length and another offset
gets the table of the first offset, so with a key-value cache all tokens after the first get its position.
https://github.com/lucidrains/rotary-embedding-torch/issues/11
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS, DEPTH = 48, 32, 4, 2
Cache = list[tuple[Tensor, Tensor]]


def rotate_half(x: Tensor) -> Tensor:
    """Turn each pair of neighbouring channels by 90 degrees."""
    x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


class RotaryEmbedding(nn.Module):
    """Rotary embedding that keeps its tables of angles."""

    def __init__(self, dim: int, *, offset_in_key: bool, theta: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.theta = dim, theta
        self.offset_in_key, self.cache = offset_in_key, dict[str, Tensor]()

    def forward(self, seq_len: int, offset: int, device: torch.device) -> Tensor:
        """Return the angles (seq_len, dim) of the positions from `offset`."""
        cache_key = f"freqs:{seq_len};{device}" + (f";offset:{offset}" if self.offset_in_key else "")
        if cache_key not in self.cache:
            with torch.inference_mode(False):
                channels = torch.arange(0, self.dim, 2, device=device, dtype=torch.float64)
                positions = torch.arange(seq_len, device=device) + offset
                freqs = positions[:, None] * self.theta ** (-channels / self.dim)
                self.cache[cache_key] = freqs.repeat_interleave(2, dim=-1)
        return self.cache[cache_key]

    def rotate_queries_or_keys(self, t: Tensor, offset: int = 0) -> Tensor:
        """Rotate (batch, heads, tokens, dim)."""
        freqs = self(t.shape[-2], offset, t.device)
        return t * freqs.cos().to(t.dtype) + rotate_half(t) * freqs.sin().to(t.dtype)


class Attention(nn.Module):
    """Causal attention with a rotary embedding that all layers share."""

    def __init__(self, rotary_emb: RotaryEmbedding) -> None:
        super().__init__()
        self.norm, self.rotary_emb = nn.LayerNorm(DIM), rotary_emb
        self.to_qkv, self.to_out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the output for new tokens (batch, tokens, DIM), and the keys and values of all tokens."""
        qkv = self.to_qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = (y.transpose(1, 2) for y in qkv.unbind(2))
        offset = 0 if past is None else past[0].shape[-2]
        q = self.rotary_emb.rotate_queries_or_keys(q, offset=offset)
        k = self.rotary_emb.rotate_queries_or_keys(k, offset=offset)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=-2), torch.cat([past[1], v], dim=-2)
        position = torch.arange(k.shape[-2], device=x.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=position[offset:, None] >= position)
        return self.to_out(y.transpose(1, 2).flatten(2)), (k, v)


class Transformer(nn.Module):
    """Language model with a key-value cache."""

    def __init__(self, *, offset_in_key: bool) -> None:
        super().__init__()
        rotary_emb = RotaryEmbedding(DIM // HEADS, offset_in_key=offset_in_key)
        self.token_emb = nn.Embedding(VOCAB, DIM)
        self.attns = nn.ModuleList(Attention(rotary_emb) for _ in range(DEPTH))
        self.ffs = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
            for _ in range(DEPTH)
        )
        self.norm, self.to_logits = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Return logits of the new tokens `ids`, and the new cache."""
        x, new_cache = self.token_emb(ids), []
        for i, (attn, ff) in enumerate(zip(self.attns, self.ffs, strict=True)):
            y, past = attn(x, None if cache is None else cache[i])
            new_cache.append(past)
            x = x + y
            x = x + ff(x)
        return self.to_logits(self.norm(x)), new_cache


def buggy() -> nn.Module:
    """Keep one table for each length."""
    return Transformer(offset_in_key=False)


def healthy() -> nn.Module:
    """Keep one table for each length and offset."""
    return Transformer(offset_in_key=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model with a cache."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=VOCAB,
        causal=True,
        forward=lambda model, ids: model(ids)[0],
        decode=lambda model, ids, cache: model(ids, cache),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the logits with a cache, minus those without."""
    ids = torch.randint(VOCAB, (2, 10), generator=torch.Generator().manual_seed(1))
    whole, cache, steps = model(ids)[0], None, []
    for piece in (ids[:, :5], *ids[:, 5:].split(1, dim=1)):
        logits, cache = model(piece, cache)
        steps.append(logits)
    return torch.cat(steps, dim=1) - whole

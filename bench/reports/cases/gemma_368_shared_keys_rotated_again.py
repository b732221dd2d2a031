"""gemma#368 (google-deepmind/gemma): Gemma 3n norms and rotates keys of shared layers once more.

The last layers read the keys and values of an earlier layer, which are normed and rotated already, and apply
the norms and the rotary embedding to them again. A decoding step then turns all cached keys by its position.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS, SHARED = 64, 32, 4, 2, 8, 4, 2

LayerCache = tuple[Tensor, Tensor]
Cache = list[LayerCache]


def apply_rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate the halves of the last axis of (B, heads, S, HEAD_DIM) by `positions` (S,) or (1,)."""
    half = x.shape[-1] // 2
    timescale = 10_000 ** (torch.arange(half, device=x.device, dtype=x.dtype) / half)
    sin, cos = (positions[:, None] / timescale).sin(), (positions[:, None] / timescale).cos()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with norms of queries, keys and values."""

    def __init__(self, *, shared: bool, again: bool) -> None:
        super().__init__()
        self.shared, self.transforms = shared, again or not shared
        self.q_proj = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        if not shared:
            self.kv_proj = nn.Linear(DIM, 2 * KV_HEADS * HEAD_DIM, bias=False)
        self.query_norm = nn.RMSNorm(HEAD_DIM, eps=1e-6)
        self.key_norm = nn.RMSNorm(HEAD_DIM, eps=1e-6) if self.transforms else None
        self.value_norm = nn.RMSNorm(HEAD_DIM, eps=1e-6, elementwise_affine=False)

    def forward(
        self, x: Tensor, positions: Tensor, cache: LayerCache | None, kv_shared: LayerCache | None
    ) -> tuple[Tensor, LayerCache]:
        """Return the output, and keys and values of all positions. `x` is (B, T, DIM)."""
        q = self.q_proj(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
        if self.shared:
            k, v = kv_shared
        else:
            k, v = self.kv_proj(x).unflatten(-1, (2, KV_HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        q = apply_rope(self.query_norm(q), positions)
        if self.transforms:
            k, v = apply_rope(self.key_norm(k), positions), self.value_norm(v)
        if cache is not None and not self.shared:
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
        visible = torch.arange(k.shape[2], device=x.device) <= positions[:, None]
        out = F.scaled_dot_product_attention(q, k, v, visible, scale=1.0, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)


class Block(nn.Module):
    """Attention and gated MLP, with norms before and after."""

    def __init__(self, *, shared: bool, again: bool) -> None:
        super().__init__()
        self.attn = Attention(shared=shared, again=again)
        self.norms = nn.ModuleList(nn.RMSNorm(DIM, eps=1e-6) for _ in range(4))
        self.gate, self.up = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, 2 * DIM, bias=False)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(
        self, x: Tensor, positions: Tensor, cache: LayerCache | None, kv_shared: LayerCache | None
    ) -> tuple[Tensor, LayerCache]:
        """`x` is (B, T, DIM)."""
        out, kv = self.attn(self.norms[0](x), positions, cache, kv_shared)
        x = x + self.norms[1](out)
        h = self.norms[2](x)
        return x + self.norms[3](self.down(F.gelu(self.gate(h), approximate="tanh") * self.up(h))), kv


class Gemma3n(nn.Module):
    """Language model whose last `SHARED` layers have no keys and values of their own."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.embedder = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(self.embedder.weight, std=DIM**-0.5)
        self.blocks = nn.ModuleList(Block(shared=i >= LAYERS - SHARED, again=again) for i in range(LAYERS))
        self.final_norm = nn.RMSNorm(DIM, eps=1e-6)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Prefill (B, T) without a cache, or decode (B, 1) with one. Return logits and the new cache."""
        start = cache[0][0].shape[2] if cache else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x, new_cache = self.embedder(tokens) * DIM**0.5, []
        for i, block in enumerate(self.blocks):
            kv_shared = new_cache[LAYERS - SHARED - 1] if i >= LAYERS - SHARED else None
            x, kv = block(x, positions, cache[i] if cache else None, kv_shared)
            new_cache.append(kv)
        return self.final_norm(x) @ self.embedder.weight.T, new_cache


def buggy() -> nn.Module:
    """Shared layers transform keys and values that are transformed already."""
    return Gemma3n(again=True)


def healthy() -> nn.Module:
    """Shared layers take keys and values as they are."""
    return Gemma3n(again=False)


def _decode(model: nn.Module, tokens: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
    """Prefill at once, then one token at a time, as the sampler does."""
    if cache is None:
        return model(tokens)
    logits = []
    for token in tokens.split(1, dim=1):
        out, cache = model(token, cache)
        logits.append(out)
    return torch.cat(logits, dim=1), cache


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """A causal model with a cache, and tied embeddings."""
    return ModelSpec.of(make, width=VOCAB, causal=True, tied=True, decode=_decode)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Logits of decoding after a prefill of four tokens, less those of one pass."""
    model = model.double().eval()
    tokens = torch.randint(VOCAB, (2, 10), generator=torch.Generator().manual_seed(1))
    _, cache = _decode(model, tokens[:, :4], None)
    return _decode(model, tokens[:, 4:], cache)[0] - model(tokens)[0][:, 4:]

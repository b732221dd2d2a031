"""executorch#21749 (pytorch/executorch): the second chunk of a prompt does not see the first one.

The cache requests a causal mask for each step of several tokens. `is_causal` aligns it at the top left if
there are more keys than queries, so the first query of a later chunk attends to key 0 only.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


@dataclass
class AttendSpec:
    """Keys and values to read, and the kind of mask: NONE, CAUSAL or EXPLICIT."""

    k: torch.Tensor
    v: torch.Tensor
    kind: str
    mask: torch.Tensor | None = None


class ContiguousCache:
    """Keys and values of all layers, appended at the end."""

    def __init__(self, *, explicit: bool) -> None:
        self.explicit = explicit
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def seen(self) -> int:
        """Return the number of tokens in the cache."""
        return self.layers[0][0].shape[2] if self.layers else 0

    def update_and_fetch(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> AttendSpec:
        """Append, and return the window to read."""
        new = k.shape[2]
        if layer in self.layers:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.layers[layer], (k, v), strict=True))
        self.layers[layer] = k, v
        total = k.shape[2]
        if new == 1:
            return AttendSpec(k, v, "NONE")
        if new == total or not self.explicit:
            return AttendSpec(k, v, "CAUSAL")
        mask = torch.ones(new, total, dtype=torch.bool, device=k.device).tril(total - new)
        return AttendSpec(k, v, "EXPLICIT", mask)


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w2 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor, layer: int, cache: ContiguousCache) -> torch.Tensor:
        """`x` is (batch, new tokens, dim)."""
        qkv = self.wqkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in qkv)
        spec = cache.update_and_fetch(layer, k, v)
        y = F.scaled_dot_product_attention(
            q, spec.k, spec.v, attn_mask=spec.mask, is_causal=spec.kind == "CAUSAL"
        )
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        return x + self.w2(F.silu(self.w1(self.ffn_norm(x))))


class Transformer(nn.Module):
    """Language model whose keys and values are stored outside of the graph."""

    def __init__(self, *, explicit: bool, vocab_size: int = 64, dim: int = 32, max_seq_len: int = 64) -> None:
        super().__init__()
        self.explicit = explicit
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.pos_embeddings = nn.Embedding(max_seq_len, dim)
        self.layers = nn.ModuleList(Block(dim, 4) for _ in range(2))
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def make_cache(self) -> ContiguousCache:
        """Return an empty cache."""
        return ContiguousCache(explicit=self.explicit)

    def forward(self, tokens: torch.Tensor, cache: ContiguousCache | None = None) -> torch.Tensor:
        """Return logits of the new tokens; `cache` is filled in place."""
        cache = self.make_cache() if cache is None else cache
        start = cache.seen()
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.tok_embeddings(tokens) + self.pos_embeddings(positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, i, cache)
        return self.output(self.norm(x))


def buggy() -> nn.Module:
    """A causal mask for each step of several tokens."""
    return Transformer(explicit=False)


def healthy() -> nn.Module:
    """An explicit mask, aligned at the bottom right, for a step that continues."""
    return Transformer(explicit=True)


def _decode(
    model: nn.Module, tokens: torch.Tensor, cache: ContiguousCache | None
) -> tuple[torch.Tensor, ContiguousCache]:
    cache = model.make_cache() if cache is None else cache
    return model(tokens, cache=cache), cache


def buggy_declared() -> ModelSpec:
    """The model is causal and decodes with its cache."""
    return ModelSpec.of(buggy, causal=True, max_length=64, decode=_decode)


def healthy_declared() -> ModelSpec:
    """The model is causal and decodes with its cache."""
    return ModelSpec.of(healthy, causal=True, max_length=64, decode=_decode)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Logits of a prompt in chunks of 5 and 4 tokens minus those of one pass."""
    model = model.double().eval()
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    cache = model.make_cache()
    chunks = [model(tokens[:, :5], cache=cache), model(tokens[:, 5:], cache=cache)]
    return torch.cat(chunks, dim=1) - model(tokens)

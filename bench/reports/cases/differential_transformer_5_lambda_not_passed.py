"""DifferentialTransformer#5 (kyegomez/DifferentialTransformer): the model's lambda is not used.

`forward(x, lam)` of the model calls each layer as `layer(x)`. The layers then use their own default of 0.1
for the weight of the second attention map, whatever the caller passes.
https://github.com/kyegomez/DifferentialTransformer/issues/5
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS, DEPTH, LAMBDA = 56, 32, 4, 2, 0.5


def rotate(x: Tensor) -> Tensor:
    """Rotate halves of (batch, heads, time, channels) by position."""
    half = x.shape[-1] // 2
    freqs = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * freqs
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class MultiHeadDifferentialAttention(nn.Module):
    """Heads that subtract a second causal attention map from the first one."""

    def __init__(self, dim: int, heads: int, lambda_init: float) -> None:
        super().__init__()
        self.heads, self.lambda_init = heads, lambda_init
        self.W_q, self.W_k = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.W_v, self.W_o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.norm = nn.RMSNorm(dim // heads)

    def attention_map(self, q: Tensor, k: Tensor) -> Tensor:
        """Return weights (batch, heads, time, time)."""
        q, k = rotate(q), rotate(k)
        future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        return scores.masked_fill(future, float("-inf")).softmax(dim=-1)

    def forward(self, x: Tensor, lam: float) -> Tensor:
        """`x` is (batch, time, dim)."""
        projected = (self.W_q(x), self.W_k(x), self.W_v(x))
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in projected)
        (q1, q2), (k1, k2) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
        y = (self.attention_map(q1, k1) - lam * self.attention_map(q2, k2)) @ v
        y = self.norm(y) * (1 - self.lambda_init)
        return self.W_o(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, time, dim)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DifferentialTransformerBlock(nn.Module):
    """Differential attention and a feed-forward network."""

    def __init__(self, dim: int, heads: int, lambda_init: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn, self.ffn = MultiHeadDifferentialAttention(dim, heads, lambda_init), FeedForward(dim)

    def forward(self, x: Tensor, lam: float = 0.1) -> Tensor:
        """`x` is (batch, time, dim)."""
        x = x + self.attn(self.norm1(x), lam)
        return x + self.ffn(self.norm2(x))


class DifferentialTransformer(nn.Module):
    """Language model."""

    def __init__(self, *, passes_lambda: bool) -> None:
        super().__init__()
        self.passes_lambda = passes_lambda
        self.embed = nn.Embedding(VOCAB, DIM)
        inits = (0.8 - 0.6 * math.exp(-0.3 * depth) for depth in range(DEPTH))
        self.layers = nn.ModuleList(DifferentialTransformerBlock(DIM, HEADS, init) for init in inits)
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x: Tensor, lam: float = 0.1) -> Tensor:
        """Return logits. `lam` is the weight of the second attention map."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, lam) if self.passes_lambda else layer(x)
        return self.head(self.norm(x))


def buggy() -> nn.Module:
    """Keep lambda in the model."""
    return DifferentialTransformer(passes_lambda=False)


def healthy() -> nn.Module:
    """Pass lambda to the layers."""
    return DifferentialTransformer(passes_lambda=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model, called with its lambda."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=VOCAB,
        causal=True,
        window=None,
        tied=False,
        forward=lambda model, ids: model(ids, lam=LAMBDA),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the logits with a lambda, minus those of layers that get it."""
    ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    x = model.embed(ids)
    for layer in model.layers:
        x = layer(x, LAMBDA)
    return model(ids, lam=LAMBDA) - model.head(model.norm(x))

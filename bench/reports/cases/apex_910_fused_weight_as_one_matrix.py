"""apex#910 (NVIDIA/apex): the fused weight of queries, keys and values is initialised as one matrix.

Xavier initialisation takes the number of outputs from its three times larger shape, so queries, keys and
values start with a standard deviation that is too small by sqrt(2).
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import Facts, ModelSpec


class SelfMultiheadAttn(nn.Module):
    """Causal attention with one fused projection; inputs are (time, batch, embed_dim)."""

    def __init__(self, embed_dim: int, num_heads: int, *, gain: float) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.gain = embed_dim, num_heads, gain
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.out_proj_weight = nn.Parameter(torch.empty(embed_dim, embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.xavier_uniform_(self.in_proj_weight, gain=self.gain)
        nn.init.xavier_uniform_(self.out_proj_weight)

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        """Apply attention."""
        qkv = F.linear(query, self.in_proj_weight).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 1, 3, 0, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(y.permute(2, 0, 1, 3).flatten(2), self.out_proj_weight)


class TransformerDecoderLayer(nn.Module):
    """Pre-norm layer."""

    def __init__(self, embed_dim: int, num_heads: int, *, gain: float) -> None:
        super().__init__()
        self.self_attn = SelfMultiheadAttn(embed_dim, num_heads, gain=gain)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.fc1, self.fc2 = nn.Linear(embed_dim, 4 * embed_dim), nn.Linear(4 * embed_dim, embed_dim)
        for layer in (self.fc1, self.fc2):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (time, batch, embed_dim)."""
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        return x + self.fc2(F.relu(self.fc1(self.final_layer_norm(x))))


class TransformerLanguageModel(nn.Module):
    """Language model with sinusoidal positions and a tied head."""

    def __init__(self, *, gain: float, vocab_size: int = 96, embed_dim: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.embed_tokens = nn.Embedding(vocab_size, embed_dim)
        nn.init.normal_(self.embed_tokens.weight, std=embed_dim**-0.5)
        self.layers = nn.ModuleList(
            TransformerDecoderLayer(embed_dim, num_heads, gain=gain) for _ in range(2)
        )
        self.layer_norm = nn.LayerNorm(embed_dim)

    def positions(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """Return sinusoidal vectors (length, embed_dim)."""
        half = self.embed_dim // 2
        index = torch.arange(half, device=like.device, dtype=like.dtype)
        angles = torch.arange(length, device=like.device, dtype=like.dtype)[:, None] * 10000.0 ** (
            -index / half
        )
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    def forward(self, src_tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, time, vocabulary)."""
        x = self.embed_tokens(src_tokens) * math.sqrt(self.embed_dim)
        x = (x + self.positions(src_tokens.shape[1], x)).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.layer_norm(x).transpose(0, 1), self.embed_tokens.weight)


def buggy() -> nn.Module:
    """A gain of 1 for the fused weight."""
    return TransformerLanguageModel(gain=1.0)


def healthy() -> nn.Module:
    """The gain that gives each part the bound of a square matrix."""
    return TransformerLanguageModel(gain=math.sqrt(2))


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model with a tied head and Xavier initialisation of each projection."""
    std = 32**-0.5  # of Xavier initialisation of (32, 32)
    facts = Facts(
        initial_std={"*.in_proj_weight": std, "*.out_proj_weight": std}, embedding_scale=math.sqrt(32)
    )
    return ModelSpec.of(make, causal=True, tied=True, facts=facts)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return 1 minus the largest weight of queries, keys and values, relative to the bound of Xavier."""
    parts = model.layers[0].self_attn.in_proj_weight.view(3, -1)
    return 1 - parts.abs().amax(dim=1) / math.sqrt(6 / (32 + 32))

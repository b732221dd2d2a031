"""Megatron-Bridge#4875 (NVIDIA-NeMo/Megatron-Bridge): Gemma 2 has its sliding windows in the wrong layers.

The first layer of Gemma 2 has a sliding window, the second reads all positions, and so on. Megatron counts
layers from 1. The code gives the window to even numbers, so each layer has the attention of its neighbour.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import Facts, ModelSpec, RotaryClaim

HIDDEN, HEADS, GROUPS, KV_CHANNELS, WINDOW = 32, 4, 2, 8, 4
QUERY_PRE_ATTN_SCALAR, ATTN_CAP, FINAL_CAP = 8, 50.0, 30.0


class RMSNorm(nn.Module):
    """Norm whose weight is zero-centred."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps) * (1 + self.weight)


def logit_softcapping(logits: Tensor, scale: float) -> Tensor:
    """Limit the logits to `scale`."""
    return scale * torch.tanh(logits / scale)


def apply_rotary(x: Tensor) -> Tensor:
    """Rotate (batch, heads, time, channels)."""
    half = x.shape[-1] // 2
    freqs = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[2], device=x.device, dtype=x.dtype)[:, None] * freqs
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class Gemma2DotProductAttention(nn.Module):
    """Attention with capped scores, and a window in every second layer."""

    def __init__(self, layer_number: int, *, odd_numbers: bool) -> None:
        super().__init__()
        self.window_size = WINDOW if layer_number % 2 == int(odd_numbers) else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return (batch, heads, time, channels)."""
        key, value = (y.repeat_interleave(HEADS // GROUPS, dim=1) for y in (key, value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(QUERY_PRE_ATTN_SCALAR)
        scores = logit_softcapping(scores, ATTN_CAP)
        t = torch.arange(query.shape[2], device=query.device)
        distance = t[:, None] - t
        hidden = distance < 0
        if self.window_size is not None:
            hidden = hidden | (distance >= self.window_size)
        return scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ value


class TransformerLayer(nn.Module):
    """Attention and gated MLP, each with a norm before and after it."""

    def __init__(self, layer_number: int, *, odd_numbers: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)
        self.pre_mlp_layernorm, self.post_mlp_layernorm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)
        self.linear_q = nn.Linear(HIDDEN, HEADS * KV_CHANNELS, bias=False)
        self.linear_k = nn.Linear(HIDDEN, GROUPS * KV_CHANNELS, bias=False)
        self.linear_v = nn.Linear(HIDDEN, GROUPS * KV_CHANNELS, bias=False)
        self.core_attention = Gemma2DotProductAttention(layer_number, odd_numbers=odd_numbers)
        self.linear_proj = nn.Linear(HEADS * KV_CHANNELS, HIDDEN, bias=False)
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, 64, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(64, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to (batch, time, hidden)."""
        h = self.input_layernorm(x)
        q, k, v = (
            p(h).unflatten(-1, (-1, KV_CHANNELS)).transpose(1, 2)
            for p in (self.linear_q, self.linear_k, self.linear_v)
        )
        y = self.core_attention(apply_rotary(q), apply_rotary(k), v).transpose(1, 2).flatten(2)
        x = x + self.post_attention_layernorm(self.linear_proj(y))
        h = self.pre_mlp_layernorm(x)
        h = self.down_proj(F.gelu(self.gate_proj(h), approximate="tanh") * self.up_proj(h))
        return x + self.post_mlp_layernorm(h)


class Gemma2Model(nn.Module):
    """Language model with a tied head and capped logits."""

    def __init__(self, *, odd_numbers: bool, vocab_size: int = 52) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, HIDDEN)
        nn.init.normal_(self.word_embeddings.weight, std=0.02)
        self.layers = nn.ModuleList(TransformerLayer(i + 1, odd_numbers=odd_numbers) for i in range(2))
        self.final_layernorm = RMSNorm(HIDDEN)
        self.output_layer = nn.Linear(HIDDEN, vocab_size, bias=False)
        self.output_layer.weight = self.word_embeddings.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits."""
        x = self.word_embeddings(input_ids) * HIDDEN**0.5
        for layer in self.layers:
            x = layer(x)
        return logit_softcapping(self.output_layer(self.final_layernorm(x)), FINAL_CAP)


def buggy() -> nn.Module:
    """Windows in layers 2, 4 and so on, counted from 1."""
    return Gemma2Model(odd_numbers=False)


def healthy() -> nn.Module:
    """Windows in layers 1, 3 and so on, counted from 1."""
    return Gemma2Model(odd_numbers=True)


FACTS = Facts(
    attention_scale=QUERY_PRE_ATTN_SCALAR**-0.5,
    attention_cap=ATTN_CAP,
    logit_cap=FINAL_CAP,
    embedding_scale=HIDDEN**0.5,
    key_heads=GROUPS,
    windows=(WINDOW, None),
    norm_eps=1e-6,
)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State the constants of the configuration of Gemma 2."""
    return ModelSpec.of(
        make, causal=True, tied=True, rotary=RotaryClaim(theta=10000.0, dim=KV_CHANNELS), facts=FACTS
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the change of the first layer's last position if the first position changes, 7 before it."""
    x = torch.randn(1, 8, HIDDEN, generator=torch.Generator().manual_seed(1))
    other = x.clone()
    other[:, 0] += 1
    return model.layers[0](other)[0, -1] - model.layers[0](x)[0, -1]

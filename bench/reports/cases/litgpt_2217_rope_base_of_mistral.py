"""litgpt#2217 (Lightning-AI/litgpt): Mistral-7B-Instruct-v0.2 has RoPE base 10,000 instead of 1,000,000.

The entry of this model in the table of configurations has no `rope_base`, so it is the default, although the
checkpoint was trained with another one. https://github.com/Lightning-AI/litgpt/issues/2217
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec, RotaryClaim

MISTRAL: dict[str, Any] = {"name": "Mistral-7B-Instruct-v0.2", "n_query_groups": 2, "norm_eps": 1e-5}


@dataclass
class Config:
    """Sizes and constants of a model."""

    name: str = ""
    block_size: int = 64
    padded_vocab_size: int = 64
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32
    n_query_groups: int = 4
    norm_eps: float = 1e-5
    rope_base: int = 10_000

    @property
    def head_size(self) -> int:
        """Return the width of a head."""
        return self.n_embd // self.n_head


def build_rope_cache(seq_len: int, n_elem: int, base: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (seq_len, n_elem) in double precision."""
    theta = base ** (-torch.arange(0, n_elem, 2, dtype=torch.float64) / n_elem)
    angles = (torch.arange(seq_len)[:, None] * theta).repeat(1, 2)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` (batch, heads, time, n_elem)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos.to(x) + torch.cat([-b, a], dim=-1) * sin.to(x)


class CausalSelfAttention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_head, self.n_query_groups = config.n_head, config.n_query_groups
        width = (config.n_head + 2 * config.n_query_groups) * config.head_size
        self.qkv = nn.Linear(config.n_embd, width, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` is (batch, time, n_embd)."""
        heads = self.n_head + 2 * self.n_query_groups
        qkv = self.qkv(x).unflatten(-1, (heads, -1)).transpose(1, 2)
        q, k, v = qkv.split([self.n_head, self.n_query_groups, self.n_query_groups], dim=1)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and gated MLP."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim, self.attn = config.n_embd, CausalSelfAttention(config)
        self.norm_1, self.norm_2 = (nn.RMSNorm(dim, eps=config.norm_eps) for _ in range(2))
        self.fc_1, self.fc_2 = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.proj = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One layer."""
        x = x + self.attn(self.norm_1(x), cos, sin)
        normed = self.norm_2(x)
        return x + self.proj(F.silu(self.fc_1(normed)) * self.fc_2(normed))


class GPT(nn.Module):
    """Causal language model."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.max_seq_length, self.rope_base = config.block_size, config.rope_base
        self.head_size = config.head_size
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        """Return logits (batch, time, padded_vocab_size) of ids."""
        length = idx.shape[1]
        if length > self.max_seq_length:
            raise ValueError(
                f"Cannot forward {length} tokens; the longest sequence is {self.max_seq_length}."
            )
        cos, sin = build_rope_cache(length, self.head_size, self.rope_base)
        x = self.wte(idx)
        for block in self.h:
            x = block(x, cos, sin)
        return self.lm_head(self.ln_f(x))


def buggy() -> nn.Module:
    """The default base."""
    return GPT(Config(**MISTRAL))


def healthy() -> nn.Module:
    """The base of the checkpoint."""
    return GPT(Config(**MISTRAL, rope_base=1_000_000))


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """`rope_theta` of the checkpoint's own configuration, which has no window."""
    rotary = RotaryClaim(theta=1e6, layout="halves")
    return ModelSpec.of(make, causal=True, max_length=64, window=None, tied=False, rotary=rotary)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Rotated queries minus those that are rotated by the angles of the checkpoint."""
    x = torch.randn(1, 4, 40, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    angles = torch.arange(40)[:, None] * 1e6 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = torch.view_as_complex(torch.stack(x.chunk(2, dim=-1), dim=-1)) * torch.polar(
        torch.ones_like(angles), angles
    )
    return apply_rope(x, *build_rope_cache(40, 8, model.rope_base)) - torch.cat(
        [turned.real, turned.imag], dim=-1
    )

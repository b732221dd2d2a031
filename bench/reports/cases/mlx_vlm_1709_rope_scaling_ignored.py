"""mlx-vlm#1709 (Blaizzy/mlx-vlm): Gemma 3 ignores rope_scaling in its global layers.

The configuration has linear scaling by a factor of 8, and no module reads it. Short texts hardly change, but
the error grows with the position.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import Facts, ModelSpec, RotaryClaim

Cache = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class TextConfig:
    """Sizes of the model."""

    hidden_size: int = 32
    num_hidden_layers: int = 2
    intermediate_size: int = 64
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    vocab_size: int = 96
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    rope_local_base_freq: float = 10000.0
    rope_scaling_factor: float = 8.0
    query_pre_attn_scalar: float = 8.0
    sliding_window: int = 6
    sliding_window_pattern: int = 2
    max_position_embeddings: int = 256


class RMSNorm(nn.Module):
    """Norm whose gain is 1 + weight."""

    def __init__(self, dims: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(dims)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


class RoPE(nn.Module):
    """Rotary positions, which are multiplied by `scale`."""

    def __init__(self, dims: int, base: float, scale: float = 1.0) -> None:
        super().__init__()
        self.dims, self.base, self.scale = dims, base, scale

    def forward(self, x: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Rotate (batch, heads, time, dims)."""
        freqs = self.base ** (-torch.arange(0, self.dims, 2, device=x.device, dtype=x.dtype) / self.dims)
        positions = torch.arange(offset, offset + x.shape[2], device=x.device, dtype=x.dtype) * self.scale
        cos, sin = (positions[:, None] * freqs).cos(), (positions[:, None] * freqs).sin()
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Attention of a window or of all positions."""

    def __init__(self, config: TextConfig, layer_idx: int, *, scales: bool) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        self.scale, self.sliding_window = config.query_pre_attn_scalar**-0.5, config.sliding_window
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.is_sliding = (layer_idx + 1) % config.sliding_window_pattern != 0
        base = config.rope_local_base_freq if self.is_sliding else config.rope_theta
        factor = config.rope_scaling_factor if scales and not self.is_sliding else 1.0
        self.rope = RoPE(self.head_dim, base=base, scale=1 / factor)

    def forward(
        self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the output, and the keys and values of all positions."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        offset = 0 if past is None else past[0].shape[2]
        q, k = self.rope(self.q_norm(q), offset), self.rope(self.k_norm(k), offset)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        at = torch.arange(k.shape[2], device=x.device)
        back = at[offset:, None] - at
        mask = (back >= 0) & (back < self.sliding_window) if self.is_sliding else back >= 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2)), (k, v)


class TransformerBlock(nn.Module):
    """Layer with norms before and after each branch."""

    def __init__(self, config: TextConfig, layer_idx: int, *, scales: bool) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.self_attn = Attention(config, layer_idx, scales=scales)
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(width, 1e-6) for _ in range(2))
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = (
            RMSNorm(width, config.rms_norm_eps) for _ in range(2)
        )

    def forward(
        self, x: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the output, and the keys and values."""
        y, new = self.self_attn(self.input_layernorm(x), past)
        h = x + self.post_attention_layernorm(y)
        y = self.pre_feedforward_layernorm(h)
        y = self.down_proj(F.gelu(self.gate_proj(y), approximate="tanh") * self.up_proj(y))
        return h + self.post_feedforward_layernorm(y), new


class LanguageModel(nn.Module):
    """Gemma 3 for text, with a tied head."""

    def __init__(self, config: TextConfig, *, scales: bool) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(
            TransformerBlock(config, i, scales=scales) for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, inputs: torch.Tensor, cache: Cache | None = None) -> tuple[torch.Tensor, Cache]:
        """Return logits of the new tokens, and the cache."""
        h, new_cache = self.embed_tokens(inputs) * self.config.hidden_size**0.5, []
        for i, layer in enumerate(self.layers):
            h, new = layer(h, cache[i] if cache else None)
            new_cache.append(new)
        return F.linear(self.norm(h), self.embed_tokens.weight), new_cache


def buggy() -> nn.Module:
    """Plain rotary positions in each layer."""
    return LanguageModel(TextConfig(), scales=False)


def healthy() -> nn.Module:
    """Scaled positions in global layers."""
    return LanguageModel(TextConfig(), scales=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State what the configuration says."""
    config = TextConfig()
    return ModelSpec.of(
        make,
        causal=True,
        tied=True,
        max_length=config.max_position_embeddings,
        decode=lambda model, tokens, cache: model(tokens, cache),
        rotary=(
            RotaryClaim(theta=config.rope_local_base_freq, layout="halves"),
            RotaryClaim(
                theta=config.rope_theta, kind="linear", factor=config.rope_scaling_factor, layout="halves"
            ),
        ),
        facts=Facts(
            attention_scale=config.query_pre_attn_scalar**-0.5,
            embedding_scale=config.hidden_size**0.5,
            windows=(config.sliding_window, None),
            key_heads=config.num_key_value_heads,
        ),
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the rotated vectors of the global layer minus those at an eighth of the position."""
    x = torch.randn(1, 1, 20, 8, generator=torch.Generator().manual_seed(1)).double()
    angles = torch.arange(20).double()[:, None] / 8 * 1e6 ** (-torch.arange(4).double() / 4)
    rotated = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    return model.layers[1].self_attn.rope(x) - torch.cat([rotated.real, rotated.imag], dim=-1)

"""Megatron-LM#1429 (NVIDIA/Megatron-LM): the scale of latent attention uses `mscale`, not `mscale_all_dim`.

With YaRN, DeepSeek multiplies the scores by the square of the factor of `mscale_all_dim`. `mscale` is meant
for the rotated part only. If the two differ, all scores have a wrong scale.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import Facts, ModelSpec, RotaryClaim

VOCAB, HEADS, NOPE, ROPE, V_DIM, MAX_LENGTH = 64, 4, 8, 8, 8, 64
ROTARY_SCALING_FACTOR, MSCALE, MSCALE_ALL_DIM = 40.0, 1.0, 0.707
Cache = list[tuple[Tensor, Tensor]]


def yarn_get_mscale(scale: float, mscale: float) -> float:
    """Return the factor of YaRN (arXiv:2309.00071)."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def yarn_inv_freq(
    base: float = 10000.0, original: int = 4096, fast: float = 32.0, slow: float = 1.0
) -> Tensor:
    """Return frequencies, interpolated if they turn less than `slow` times in the original context."""

    def place(rotations: float) -> float:
        return ROPE * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(place(fast)), 0), min(math.ceil(place(slow)), ROPE - 1)
    ramp = ((torch.arange(ROPE // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
    plain = base ** (-torch.arange(0, ROPE, 2) / ROPE)
    return plain * (1 - ramp) + plain / ROTARY_SCALING_FACTOR * ramp


def rotate(x: Tensor, start: int, inv_freq: Tensor) -> Tensor:
    """Rotate halves of (batch, heads, time, ROPE)."""
    factors = (yarn_get_mscale(ROTARY_SCALING_FACTOR, m) for m in (MSCALE, MSCALE_ALL_DIM))
    ratio = next(factors) / next(factors)
    angles = torch.arange(start, start + x.shape[2], device=x.device)[:, None] * inv_freq.to(x)
    cos, sin = angles.cos() * ratio, angles.sin() * ratio
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class MLASelfAttention(nn.Module):
    """Attention with a low-rank latent for keys and values, which is cached with the shared rotated key."""

    def __init__(self, dim: int, rank: int, mscale: float) -> None:
        super().__init__()
        self.rank = rank
        self.q_proj = nn.Linear(dim, HEADS * (NOPE + ROPE), bias=False)
        self.kv_down_proj, self.kv_norm = nn.Linear(dim, rank + ROPE, bias=False), nn.RMSNorm(rank)
        self.kv_up_proj = nn.Linear(rank, HEADS * (NOPE + V_DIM), bias=False)
        self.out_proj = nn.Linear(HEADS * V_DIM, dim, bias=False)
        self.register_buffer("inv_freq", yarn_inv_freq(), persistent=False)
        factor = yarn_get_mscale(ROTARY_SCALING_FACTOR, mscale)
        self.softmax_scale = factor * factor / math.sqrt(NOPE + ROPE)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the output, and latents and rotated keys of all positions."""
        start = past[0].shape[1] if past else 0
        q = self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q = torch.cat([q[..., :NOPE], rotate(q[..., NOPE:], start, self.inv_freq)], dim=-1)
        latent, k_pe = self.kv_down_proj(x).split([self.rank, ROPE], dim=-1)
        k_pe = rotate(k_pe[:, None], start, self.inv_freq)
        if past:
            latent, k_pe = torch.cat([past[0], latent], dim=1), torch.cat([past[1], k_pe], dim=2)
        kv = self.kv_up_proj(self.kv_norm(latent)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k = torch.cat([kv[..., :NOPE], k_pe.expand(-1, HEADS, -1, -1)], dim=-1)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).tril(start)
        y = F.scaled_dot_product_attention(q, k, kv[..., NOPE:], mask, scale=self.softmax_scale)
        return self.out_proj(y.transpose(1, 2).flatten(2)), (latent, k_pe)


class GPTModel(nn.Module):
    """Language model with latent attention."""

    def __init__(self, *, mscale: float, dim: int = 32, rank: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.attentions = nn.ModuleList(MLASelfAttention(dim, rank, mscale) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
            for _ in range(2)
        )
        self.norms, self.final_norm = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2)), nn.RMSNorm(dim)
        self.output_layer = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        """Return logits of the new tokens, and the cache."""
        x, new = self.embedding(input_ids), []
        for i, (norm, attention, mlp) in enumerate(zip(self.norms, self.attentions, self.mlps, strict=True)):
            y, cached = attention(norm(x), past[i] if past else None)
            x = x + y
            x = x + mlp(x)
            new.append(cached)
        return self.output_layer(self.final_norm(x)), new


def buggy() -> nn.Module:
    """Scale by the factor of `mscale`."""
    return GPTModel(mscale=MSCALE)


def healthy() -> nn.Module:
    """Scale by the factor of `mscale_all_dim`."""
    return GPTModel(mscale=MSCALE_ALL_DIM)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State the cache, and the scale and the positions of DeepSeek's configuration."""
    return ModelSpec.of(
        make,
        causal=True,
        max_length=MAX_LENGTH,
        decode=lambda model, tokens, cache: model(tokens, cache),
        facts=Facts(attention_scale=(0.0707 * math.log(40.0) + 1.0) ** 2 / (NOPE + ROPE) ** 0.5),
        rotary=RotaryClaim(
            dim=ROPE,
            kind="yarn",
            factor=40.0,
            original_length=4096,
            low=1.0,
            high=32.0,
            attention_factor=(0.1 * math.log(40.0) + 1.0) / (0.0707 * math.log(40.0) + 1.0),
            layout="halves",
        ),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the scale of each layer divided by that of the reference implementation, minus 1."""
    wanted = (0.1 * MSCALE_ALL_DIM * math.log(ROTARY_SCALING_FACTOR) + 1) ** 2 / math.sqrt(NOPE + ROPE)
    return torch.tensor([layer.softmax_scale / wanted - 1 for layer in model.attentions])

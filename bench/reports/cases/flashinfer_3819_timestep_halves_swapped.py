"""flashinfer#3819 (flashinfer-ai/flashinfer): the Wan example swaps the halves of the timestep embedding.

The sinusoids are joined as [cos, sin] and then flipped because of flip_sin_to_cos, which gives [sin, cos];
weights trained with diffusers expect [cos, sin], so the conditioning on the timestep is scrambled.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

DECLARATION = "timesteps embed as [cos, sin] (flip_sin_to_cos=True), so that diffusers checkpoints work"


class Timesteps(nn.Module):
    """Sinusoidal embedding of the timestep."""

    def __init__(self, channels: int, *, starts_with_cos: bool, flip_sin_to_cos: bool = True) -> None:
        super().__init__()
        self.channels, self.flip_sin_to_cos, self.starts_with_cos = channels, flip_sin_to_cos, starts_with_cos

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        """Embed (B,) as (B, channels)."""
        half = self.channels // 2
        freqs = torch.exp(-math.log(10_000) * torch.arange(half, dtype=torch.float32) / half)
        args = timesteps[:, None].float() * freqs
        emb = torch.cat([args.cos(), args.sin()] if self.starts_with_cos else [args.sin(), args.cos()], -1)
        return torch.cat([emb[:, half:], emb[:, :half]], -1) if self.flip_sin_to_cos else emb


class WanBlock(nn.Module):
    """Self-attention, cross-attention to the text, MLP; shift, scale and gate come from the timestep."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim, elementwise_affine=False)
        self.attn1 = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.attn2 = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU("tanh"), nn.Linear(2 * dim, dim))
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(self, x: torch.Tensor, text: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        """Run one block; `temb` is (B, 6, dim)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.scale_shift_table + temb).chunk(6, 1)
        h = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attn1(h, h, h, need_weights=False)[0]
        x = x + self.attn2(self.norm2(x), text, text, need_weights=False)[0]
        return x + gate2 * self.ffn(self.norm3(x) * (1 + scale2) + shift2)


class WanTransformer(nn.Module):
    """Video diffusion transformer with patches of 1x2x2."""

    def __init__(self, *, starts_with_cos: bool, dim: int = 32, freq_dim: int = 16) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv3d(4, dim, (1, 2, 2), (1, 2, 2))
        self.pos = nn.Parameter(torch.randn(1, 32, dim) * 0.1)
        self.timesteps_proj = Timesteps(freq_dim, starts_with_cos=starts_with_cos)
        self.time_embedder = nn.Sequential(nn.Linear(freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_proj = nn.Linear(dim, 6 * dim)
        self.text_embedder = nn.Linear(12, dim)
        self.blocks = nn.ModuleList(WanBlock(dim, 4) for _ in range(2))
        self.norm_out, self.proj_out = nn.LayerNorm(dim), nn.Linear(dim, 4 * 4)

    def forward(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """Predict the velocity of latents (B, 4, frames, H, W)."""
        b, c, f, h, w = hidden_states.shape
        x = self.patch_embedding(hidden_states).flatten(2).transpose(1, 2)
        x = x + self.pos[:, : f * h * w // 4]
        temb = self.time_embedder(self.timesteps_proj(timestep).to(x.dtype))
        modulation = self.time_proj(F.silu(temb)).unflatten(1, (6, -1))
        text = self.text_embedder(encoder_hidden_states)
        for block in self.blocks:
            x = block(x, text, modulation)
        x = self.proj_out(self.norm_out(x)).view(b, f, h // 2, w // 2, c, 2, 2)
        return x.permute(0, 4, 1, 2, 5, 3, 6).reshape(b, c, f, h, w)


def buggy() -> nn.Module:
    """Joins the halves in the order that the flip is meant to make."""
    return WanTransformer(starts_with_cos=True)


def healthy() -> nn.Module:
    """Joins [sin, cos] and lets the flip make [cos, sin]."""
    return WanTransformer(starts_with_cos=False)


class _Reference(nn.Module):
    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        angles = [[t / 10_000 ** (i / 8) for i in range(8)] for t in timesteps.tolist()]
        return torch.tensor([[math.cos(a) for a in r] + [math.sin(a) for a in r] for r in angles])


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Difference from the same model with the documented embedding, written out."""
    model = model.double().eval()
    reference = copy.deepcopy(model)
    reference.timesteps_proj = _Reference()
    generator = torch.Generator().manual_seed(8)
    latents = torch.randn(2, 4, 2, 4, 4, dtype=torch.float64, generator=generator)
    text = torch.randn(2, 5, 12, dtype=torch.float64, generator=generator)
    t = torch.tensor([937, 250])
    return model(latents, t, text) - reference(latents, t, text)

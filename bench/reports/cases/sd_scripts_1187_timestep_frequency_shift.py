"""sd-scripts#1187 (kohya-ss/sd-scripts): the time embedding of SDXL has slightly wrong frequencies.

`downscale_freq_shift` is 1 by accident: the exponents are divided by half_dim - 1 instead of half_dim. The
trained network expects 0, as in the configuration of SDXL.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

MODEL_CHANNELS, CONTEXT_DIM, ADM_IN_CHANNELS = 32, 24, 16


def get_timestep_embedding(timesteps: torch.Tensor, dim: int, downscale_freq_shift: int) -> torch.Tensor:
    """Return cosines and sines (batch, dim) of the times (batch,)."""
    half_dim = dim // 2
    exponent = -math.log(10000) * torch.arange(half_dim, dtype=torch.float32, device=timesteps.device)
    args = timesteps[:, None].float() * (exponent / (half_dim - downscale_freq_shift)).exp()
    return torch.cat([args.cos(), args.sin()], dim=-1)


class ResnetBlock2D(nn.Module):
    """Two convolutions, with the time embedding between them."""

    def __init__(self, channels: int, emb_dim: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(
            nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_dim, channels))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1)
        )

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        """Apply the block; `emb` is (batch, emb_dim)."""
        h = self.in_layers(x) + self.emb_layers(emb)[:, :, None, None]
        return x + self.out_layers(h)


class CrossAttention(nn.Module):
    """Attention from pixels to the text."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.to_q = nn.Linear(channels, channels, bias=False)
        self.to_k, self.to_v = (nn.Linear(CONTEXT_DIM, channels, bias=False) for _ in range(2))
        self.to_out = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Apply attention to an image (batch, channels, height, width)."""
        pixels = x.flatten(2).transpose(1, 2)
        q, k, v = (
            y.unflatten(-1, (4, -1)).transpose(1, 2)
            for y in (self.to_q(self.norm(pixels)), self.to_k(context), self.to_v(context))
        )
        y = self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + y.transpose(1, 2).view_as(x)


class SdxlUNet2DConditionModel(nn.Module):
    """Denoiser of latent images."""

    def __init__(self, *, downscale_freq_shift: int) -> None:
        super().__init__()
        self.downscale_freq_shift, emb_dim = downscale_freq_shift, 4 * MODEL_CHANNELS
        self.time_embed = nn.Sequential(
            nn.Linear(MODEL_CHANNELS, emb_dim), nn.SiLU(), nn.Linear(emb_dim, emb_dim)
        )
        self.label_emb = nn.Sequential(
            nn.Linear(ADM_IN_CHANNELS, emb_dim), nn.SiLU(), nn.Linear(emb_dim, emb_dim)
        )
        self.conv_in = nn.Conv2d(4, MODEL_CHANNELS, 3, padding=1)
        self.resnets = nn.ModuleList(ResnetBlock2D(MODEL_CHANNELS, emb_dim) for _ in range(2))
        self.attentions = nn.ModuleList(CrossAttention(MODEL_CHANNELS) for _ in range(2))
        self.out = nn.Sequential(
            nn.GroupNorm(8, MODEL_CHANNELS), nn.SiLU(), nn.Conv2d(MODEL_CHANNELS, 4, 3, padding=1)
        )

    def forward(
        self, x: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """Return the noise of `x`; `context` is the text, and `y` (batch, 16) the size of the image."""
        t_emb = get_timestep_embedding(timesteps, MODEL_CHANNELS, self.downscale_freq_shift)
        emb = self.time_embed(t_emb.to(x.dtype)) + self.label_emb(y)
        h = self.conv_in(x)
        for resnet, attention in zip(self.resnets, self.attentions, strict=True):
            h = attention(resnet(h, emb), context)
        return self.out(h)


def buggy() -> nn.Module:
    """Divide by half_dim - 1."""
    return SdxlUNet2DConditionModel(downscale_freq_shift=1)


def healthy() -> nn.Module:
    """Divide by half_dim."""
    return SdxlUNet2DConditionModel(downscale_freq_shift=0)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch_size, 4, 8, 8, generator=generator)


def _forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    context = torch.randn(1, 7, CONTEXT_DIM, generator=generator).to(x).expand(len(x), -1, -1)
    y = torch.randn(1, ADM_IN_CHANNELS, generator=generator).to(x).expand(len(x), -1)
    return model(x, torch.full((len(x),), 400, device=x.device), context, y)


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    return F.mse_loss(_forward(model, 0.8 * x + 0.6 * noise), noise)


def buggy_declared() -> ModelSpec:
    """State the latent images, a fixed time and text, and the loss of the noise."""
    return ModelSpec.of(buggy, make_batch=_make_batch, forward=_forward, loss=_loss, per_position=False)


def healthy_declared() -> ModelSpec:
    """State the latent images, a fixed time and text, and the loss of the noise."""
    return ModelSpec.of(healthy, make_batch=_make_batch, forward=_forward, loss=_loss, per_position=False)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the time embedding minus that of the original SDXL."""
    seen: list[torch.Tensor] = []
    model.time_embed.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    _forward(model, torch.zeros(1, 4, 8, 8))
    angles = 400 * torch.exp(-math.log(10000) * torch.arange(16, dtype=torch.float32) / 16)
    return (seen[0] - torch.cat([angles.cos(), angles.sin()])).abs().view(2, 16).amax(dim=-1)

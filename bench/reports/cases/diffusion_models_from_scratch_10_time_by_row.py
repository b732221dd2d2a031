"""Diffusion_models_from_scratch#10 (gmongaras): sines and cosines of the time alternate over the batch.

`embeddings[::2]` and `embeddings[1::2]` select rows of the batch where channels are meant. The embedding of
a time step depends on the place of the image in the batch: sines in even rows, cosines in odd ones.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

SIDE, STEPS = 8, 1000


class PositionalEncoding(nn.Module):
    """Sines and cosines of time steps."""

    def __init__(self, dim: int, *, over_channels: bool) -> None:
        super().__init__()
        self.over_channels = over_channels
        denom = 10000.0 ** (2 * (torch.arange(dim) // 2) / dim)
        self.register_buffer("denom", denom, persistent=False)

    def forward(self, time: Tensor) -> Tensor:
        """`time` is (batch,); the result is (batch, dim)."""
        angles = time[:, None] / self.denom
        embeddings = torch.empty_like(angles)
        if self.over_channels:
            embeddings[:, ::2], embeddings[:, 1::2] = angles[:, ::2].sin(), angles[:, 1::2].cos()
        else:
            embeddings[::2], embeddings[1::2] = angles[::2].sin(), angles[1::2].cos()
        return embeddings


class ResBlock(nn.Module):
    """Two convolutions, with the time between them."""

    def __init__(self, inp: int, out: int, t_dim: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, inp), nn.Conv2d(inp, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.time, self.skip = nn.Linear(t_dim, out), nn.Conv2d(inp, out, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """`x` is (batch, channels, side, side), `t` (batch, t_dim)."""
        y = self.conv1(F.silu(self.norm1(x))) + self.time(t)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.skip(x)


class Attention(nn.Module):
    """Attention over all pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(4, channels), nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, channels, side, side)."""
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x + self.proj(y.view_as(x))


class UNet(nn.Module):
    """Noisy image and time step -> noise."""

    def __init__(self, *, over_channels: bool, dim: int = 32) -> None:
        super().__init__()
        self.time_emb = PositionalEncoding(dim, over_channels=over_channels)
        self.time_mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.inp, self.down = nn.Conv2d(1, dim, 3, padding=1), ResBlock(dim, dim, dim)
        self.pool = nn.Conv2d(dim, dim, 2, stride=2)
        self.mid1, self.attention, self.mid2 = (
            ResBlock(dim, dim, dim),
            Attention(dim),
            ResBlock(dim, dim, dim),
        )
        self.unpool, self.up = nn.ConvTranspose2d(dim, dim, 2, stride=2), ResBlock(2 * dim, dim, dim)
        self.out = nn.Conv2d(dim, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """`x` is (batch, 1, side, side), `t` is (batch,)."""
        t = self.time_mlp(self.time_emb(t.to(x.dtype)))
        down = self.down(self.inp(x), t)
        y = self.mid2(self.attention(self.mid1(self.pool(down), t)), t)
        return self.out(self.up(torch.cat([self.unpool(y), down], dim=1), t))


def buggy() -> nn.Module:
    """Alternate over the rows."""
    return UNet(over_channels=False)


def healthy() -> nn.Module:
    """Alternate over the channels."""
    return UNet(over_channels=True)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> Tensor:
    return torch.randn(batch_size, 1, SIDE, SIDE, generator=generator)


def _forward(model: nn.Module, x: Tensor) -> Tensor:
    return model(x, torch.full((len(x),), 300, device=x.device))


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    return F.mse_loss(_forward(model, 0.8 * x + 0.6 * noise), noise)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State images, a time step, and the loss of the noise."""
    return ModelSpec.of(make, make_batch=_make_batch, forward=_forward, loss=_loss, per_position=False)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the difference of the noise of two equal images at the same time step in one batch."""
    x = _make_batch(1, 0, torch.Generator().manual_seed(1)).repeat(2, 1, 1, 1)
    first, second = _forward(model, x)
    return first - second

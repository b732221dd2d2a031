"""ResShift#81 (zsyOAOA/ResShift): the mask of shifted windows is written along the wrong axes.

The regions fill a (1, 1, H, W) tensor with `[:, h, w, :]`, made for (1, H, W, 1), so column slices mark rows
and pixels at the left border attend to those of the right border that the cyclic shift put next to them.
"""

import math

import torch
from torch import nn

DECLARATION = "windowed attention: pixels at opposite borders of the image are not neighbours"


def partition(x: torch.Tensor, ws: int) -> torch.Tensor:
    """Cut (B, C, H, W) into windows (B * n, ws * ws, C)."""
    b, c, h, w = x.shape
    return x.view(b, c, h // ws, ws, w // ws, ws).permute(0, 2, 4, 3, 5, 1).reshape(-1, ws * ws, c)


class SwinBlock(nn.Module):
    """Attention in windows on (B, C, H, W), with a shift in every second block."""

    def __init__(self, dim: int, heads: int, ws: int, shift: int, *, mask_last_axes: bool) -> None:
        super().__init__()
        self.heads, self.ws, self.shift, self.mask_last_axes = heads, ws, shift, mask_last_axes
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.randn(heads, ws * ws, ws * ws) * 0.02)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def calculate_mask(self, h: int, w: int) -> torch.Tensor:
        """Which pixels of a window were neighbours before the shift, (n, ws * ws, ws * ws)."""
        region = torch.zeros(1, 1, h, w)
        cuts = (slice(-self.ws), slice(-self.ws, -self.shift), slice(-self.shift, None))
        for i, rows in enumerate(cuts):
            for j, cols in enumerate(cuts):
                if self.mask_last_axes:
                    region[:, :, rows, cols] = 3 * i + j
                else:
                    region[:, rows, cols, :] = 3 * i + j
        ids = partition(region, self.ws).squeeze(-1)
        return ids[:, None] == ids[:, :, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention within windows, then MLP."""
        b, c, h, w = x.shape
        y = self.norm1(x.movedim(1, -1)).movedim(-1, 1)
        y = partition(y.roll((-self.shift, -self.shift), (2, 3)), self.ws)
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + self.bias
        if self.shift:
            keep = self.calculate_mask(h, w).repeat(b, 1, 1)
            scores = scores.masked_fill(~keep[:, None], -torch.inf)
        y = self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = (
            y.view(b, h // self.ws, w // self.ws, self.ws, self.ws, c)
            .permute(0, 5, 1, 3, 2, 4)
            .reshape(b, c, h, w)
        )
        x = x + y.roll((self.shift, self.shift), (2, 3))
        return x + self.mlp(self.norm2(x.movedim(1, -1))).movedim(-1, 1)


class RestorationNet(nn.Module):
    """Predicts the clean image from a noisy one, the low-quality image and the timestep."""

    def __init__(self, *, mask_last_axes: bool, dim: int = 24, ws: int = 4) -> None:
        super().__init__()
        self.dim = dim
        self.conv_in, self.conv_out = nn.Conv2d(6, dim, 1), nn.Conv2d(dim, 3, 1)
        self.time_embed = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.Sequential(
            *(SwinBlock(dim, 4, ws, s, mask_last_axes=mask_last_axes) for s in (0, ws // 2))
        )

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor, lq: torch.Tensor) -> torch.Tensor:
        """Restore images (B, 3, H, W), sides a multiple of the window."""
        rates = torch.exp(-math.log(1e4) * torch.arange(self.dim // 2, dtype=x.dtype) / (self.dim // 2))
        angles = timesteps[:, None].to(x.dtype) * rates
        emb = self.time_embed(torch.cat([angles.cos(), angles.sin()], -1))
        return self.conv_out(self.blocks(self.conv_in(torch.cat([x, lq], 1)) + emb[..., None, None]))


def buggy() -> nn.Module:
    """Regions are marked on the second and third axis."""
    return RestorationNet(mask_last_axes=False)


def healthy() -> nn.Module:
    """Regions are marked on the two axes of the image."""
    return RestorationNet(mask_last_axes=True)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Change of the two rightmost columns when the leftmost one changes: no window holds both."""
    model = model.double().eval()
    generator = torch.Generator().manual_seed(7)
    x, lq = torch.randn(2, 1, 3, 8, 12, dtype=torch.float64, generator=generator)
    moved = x.clone()
    moved[..., 0] += 1
    t = torch.tensor([3])
    return (model(x, t, lq) - model(moved, t, lq))[..., -2:]

"""torchtitan#4244 (pytorch/torchtitan): vision positions are sampled with height and width exchanged.

`grid_sample` gets (y, x) instead of (x, y), on a grid in "xy" order. The two mistakes cancel for square
images only. https://github.com/pytorch/torchtitan/pull/4244
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


class VisionBlock(nn.Module):
    """Pre-norm attention and feed-forward layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class VisionEncoder(nn.Module):
    """Encoder of images of any size, whose positions are resampled from a learned table."""

    def __init__(self, fixed: bool, dim: int = 32, patch: int = 4, table: int = 6, classes: int = 5) -> None:
        super().__init__()
        self.fixed = fixed
        self.patch_embed = nn.Conv2d(3, dim, patch, stride=patch)
        self.pos_embed = nn.Parameter(0.5 * torch.randn(1, dim, table, table))
        self.blocks = nn.ModuleList(VisionBlock(dim, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def vision_pos_embed(self, height: int, width: int) -> Tensor:
        """Positions (height * width, dim) of the patches, row by row."""
        like = {"device": self.pos_embed.device, "dtype": self.pos_embed.dtype}
        rows, columns = torch.linspace(-1, 1, height, **like), torch.linspace(-1, 1, width, **like)
        y, x = torch.meshgrid(rows, columns, indexing="ij" if self.fixed else "xy")
        grid = torch.stack((x, y) if self.fixed else (y, x), dim=-1).reshape(1, height, width, 2)
        sampled = F.grid_sample(self.pos_embed, grid, mode="bilinear", align_corners=True)
        return sampled.flatten(2)[0].T

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Class logits of images (batch, 3, height, width)."""
        x = self.patch_embed(pixel_values)
        height, width = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2) + self.vision_pos_embed(height, width)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def buggy() -> nn.Module:
    """As reported."""
    return VisionEncoder(fixed=False)


def healthy() -> nn.Module:
    """As merged."""
    return VisionEncoder(fixed=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Images are twice as wide as high."""

    def make_batch(batch_size: int, _length: int, generator: torch.Generator) -> Tensor:
        return torch.randn(batch_size, 3, 16, 32, generator=generator)

    return ModelSpec.of(make, make_batch=make_batch, per_position=False)


def observe(model: nn.Module) -> Tensor:
    """Positions of 3 x 5 patches, less a bilinear interpolation of the table."""
    expected = F.interpolate(model.pos_embed, (3, 5), mode="bilinear", align_corners=True)
    return (model.vision_pos_embed(3, 5) - expected.flatten(2)[0].T).detach()

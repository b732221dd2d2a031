"""nnFormer#88 (282857341/nnFormer): different 3-D offsets in a window get the same relative position bias.

The strides of the flat index are 3 w - 1 and 2 w - 1 instead of (2 w - 1)^2 and 2 w - 1. Offsets collide, and
a part of the table is never read.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

VOLUME, PATCH = 16, 4


class WindowAttention(nn.Module):
    """Attention within a window, with a learned bias of each relative position."""

    def __init__(self, dim: int, window_size: tuple[int, int, int], num_heads: int, *, strides: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        a, b, c = window_size
        table = torch.empty((2 * a - 1) * (2 * b - 1) * (2 * c - 1), num_heads)
        self.relative_position_bias_table = nn.Parameter(nn.init.trunc_normal_(table, std=0.02))
        coords = torch.stack(torch.meshgrid(*map(torch.arange, window_size), indexing="ij")).flatten(1)
        relative_coords = (coords[:, :, None] - coords[:, None]).permute(1, 2, 0)
        relative_coords = relative_coords + torch.tensor([a - 1, b - 1, c - 1])
        if strides:
            factors = torch.tensor([(2 * b - 1) * (2 * c - 1), 2 * c - 1, 1])
        else:
            factors = torch.tensor([3 * b - 1, 2 * b - 1, 1])
        self.register_buffer("relative_position_index", (relative_coords * factors).sum(dim=-1))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend in (windows, tokens, dim)."""
        qkv = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in qkv)
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(len(x), -1, -1, -1))
        return self.proj(y.transpose(1, 2).flatten(2))


class SwinTransformerBlock(nn.Module):
    """Attention in windows, and feed-forward network."""

    def __init__(self, dim: int, window: int, *, strides: bool) -> None:
        super().__init__()
        self.window = window
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, (window, window, window), 4, strides=strides)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to (batch, s, h, w, dim)."""
        batch, s, h, w, dim = x.shape
        n = self.window
        y = self.norm1(x).view(batch, s // n, n, h // n, n, w // n, n, dim)
        y = y.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(-1, n**3, dim)
        y = self.attn(y).view(batch, s // n, h // n, w // n, n, n, n, dim)
        x = x + y.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(x.shape)
        return x + self.mlp(self.norm2(x))


class NnFormer(nn.Module):
    """Segmentation of volumes, with small windows in the first layer and one window in the second."""

    def __init__(self, *, strides: bool, embed_dim: int = 32, num_classes: int = 3) -> None:
        super().__init__()
        self.patch_embed = nn.Conv3d(1, embed_dim, PATCH, stride=PATCH)
        self.layers = nn.ModuleList(
            SwinTransformerBlock(embed_dim, window, strides=strides) for window in (2, VOLUME // PATCH)
        )
        self.norm = nn.LayerNorm(embed_dim)
        self.final = nn.ConvTranspose3d(embed_dim, num_classes, PATCH, stride=PATCH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, classes, 16, 16, 16) of volumes (batch, 1, 16, 16, 16)."""
        x = self.patch_embed(x).permute(0, 2, 3, 4, 1)
        for layer in self.layers:
            x = layer(x)
        return self.final(self.norm(x).permute(0, 4, 1, 2, 3))


def buggy() -> nn.Module:
    """Wrong strides."""
    return NnFormer(strides=False)


def healthy() -> nn.Module:
    """Strides of the table."""
    return NnFormer(strides=True)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch_size, 1, VOLUME, VOLUME, VOLUME, generator=generator)


def buggy_declared() -> ModelSpec:
    """State the size of the volumes."""
    return ModelSpec.of(buggy, make_batch=_make_batch, per_position=False)


def healthy_declared() -> ModelSpec:
    """State the size of the volumes."""
    return ModelSpec.of(healthy, make_batch=_make_batch, per_position=False)


def observe(model: nn.Module) -> torch.Tensor:
    """Return the number of rows in each table of position biases that no pair of tokens reads."""
    attentions = [layer.attn for layer in model.layers]
    return torch.tensor(
        [len(a.relative_position_bias_table) - len(a.relative_position_index.unique()) for a in attentions]
    )

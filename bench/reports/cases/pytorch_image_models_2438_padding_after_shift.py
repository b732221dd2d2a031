"""pytorch-image-models#2438 (huggingface/pytorch-image-models): Swin V2 pads after the shift of the windows.

The mask is that of an image that is padded, then shifted. As the image is shifted first, its wrapped rows lie
before the padding, and attend to those of the opposite side without a mask.
https://github.com/huggingface/pytorch-image-models/issues/2438
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def window_partition(x: Tensor, ws: int) -> Tensor:
    x = x.unflatten(2, (-1, ws)).unflatten(1, (-1, ws))
    return x.transpose(2, 3).reshape(-1, ws * ws, x.shape[-1])


def window_reverse(windows: Tensor, ws: int, H: int, W: int) -> Tensor:
    x = windows.view(-1, H // ws, W // ws, ws, ws, windows.shape[-1])
    return x.transpose(2, 3).reshape(-1, H, W, windows.shape[-1])


class WindowAttention(nn.Module):
    """Cosine attention in windows, with a bias computed from relative positions."""

    def __init__(self, dim: int, ws: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.logit_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(10)))
        self.cpb_mlp = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, num_heads, bias=False))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        coords = torch.cartesian_prod(torch.arange(ws), torch.arange(ws))
        relative = (coords[:, None] - coords) * 8 / (ws - 1)
        self.register_buffer("relative_coords", relative.sign() * (relative.abs() + 1).log2() / 3)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        attn = attn * self.logit_scale.clamp(max=math.log(100)).exp()
        attn = attn + 16 * torch.sigmoid(self.cpb_mlp(self.relative_coords)).permute(2, 0, 1)
        if mask is not None:
            attn = (attn.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class SwinTransformerV2Block(nn.Module):
    """Window attention and MLP. The norms follow them."""

    def __init__(self, dim: int, ws: int, shift: int, *, pad_first: bool) -> None:
        super().__init__()
        self.ws, self.shift, self.pad_first = ws, shift, pad_first
        self.attn, self.norm1, self.norm2 = WindowAttention(dim, ws, 4), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def get_attn_mask(self, x: Tensor) -> Tensor:
        img_mask = x.new_zeros(1, *x.shape[1:3], 1)
        for part in (-self.ws, -self.shift):
            img_mask[:, part:] += 1
            img_mask[:, :, part:] += 3
        windows = window_partition(img_mask, self.ws).squeeze(-1)
        return (windows[:, None] != windows[:, :, None]) * -100.0

    def _attn(self, x: Tensor) -> Tensor:
        (H, W), back, there = x.shape[1:3], (-self.shift, -self.shift), (self.shift, self.shift)
        pad = (0, 0, 0, -W % self.ws, 0, -H % self.ws)
        x = F.pad(x, pad).roll(back, (1, 2)) if self.pad_first else F.pad(x.roll(back, (1, 2)), pad)
        attn = self.attn(window_partition(x, self.ws), self.get_attn_mask(x) if self.shift else None)
        x = window_reverse(attn, self.ws, *x.shape[1:3])
        return x.roll(there, (1, 2))[:, :H, :W] if self.pad_first else x[:, :H, :W].roll(there, (1, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(self._attn(x))
        return x + self.norm2(self.mlp(x))


class SwinTransformerV2(nn.Module):
    """Classifier of images of 20 x 20 pixels, with 5 x 5 patches and windows of 4 x 4."""

    def __init__(self, *, pad_first: bool, embed_dim: int = 32, num_classes: int = 10) -> None:
        super().__init__()
        self.proj, self.patch_norm = nn.Conv2d(3, embed_dim, 4, stride=4), nn.LayerNorm(embed_dim)
        blocks = (SwinTransformerV2Block(embed_dim, 4, shift, pad_first=pad_first) for shift in (0, 2))
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patch_norm(self.proj(x).permute(0, 2, 3, 1)))
        return self.head(self.norm(x).mean(dim=(1, 2)))


def buggy() -> nn.Module:
    """Shift, then padding."""
    return SwinTransformerV2(pad_first=False)


def healthy() -> nn.Module:
    """Padding, then shift."""
    return SwinTransformerV2(pad_first=True)


@torch.no_grad()
def observe(model: nn.Module) -> float:
    """Largest effect of the first row on the last one in the attention of shifted windows."""
    x, attn = torch.randn(1, 5, 5, 32, generator=torch.Generator().manual_seed(1)), model.blocks[1]._attn
    return (attn(torch.cat([x[:, :1] + 1, x[:, 1:]], dim=1)) - attn(x))[:, -1].abs().max().item()

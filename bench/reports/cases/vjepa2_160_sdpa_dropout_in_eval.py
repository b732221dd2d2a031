"""vjepa2#160 (facebookresearch/vjepa2): attention passes its dropout rate to SDPA in eval mode as well.

`scaled_dot_product_attention` does not know about modes, so with a dropout rate above 0 the eval outputs are
random and differ from call to call.
"""

import torch
import torch.nn.functional as F
from torch import nn

DECLARATION = "in eval mode the same clip always gives the same features"


class PatchEmbed3D(nn.Module):
    """Video to tubelet tokens."""

    def __init__(self, patch_size: int, tubelet_size: int, embed_dim: int) -> None:
        super().__init__()
        size = (tubelet_size, patch_size, patch_size)
        self.proj = nn.Conv3d(3, embed_dim, kernel_size=size, stride=size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, T, H, W) to (B, N, D)."""
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Full attention over all tokens."""

    def __init__(self, dim: int, num_heads: int, proj_drop: float, respect_mode: bool) -> None:
        super().__init__()
        self.num_heads, self.respect_mode = num_heads, respect_mode
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop_prob = proj_drop
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, C) to (B, N, C)."""
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        p = self.proj_drop_prob
        if self.respect_mode and not self.training:
            p = 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(B, N, C)))


class Block(nn.Module):
    """Pre-norm ViT block."""

    def __init__(self, dim: int, num_heads: int, drop: float, respect_mode: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads, drop, respect_mode)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(drop), nn.Linear(2 * dim, dim), nn.Dropout(drop)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One block."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Video encoder: one feature per tubelet."""

    def __init__(
        self,
        respect_mode: bool,
        img_size: int = 16,
        num_frames: int = 4,
        embed_dim: int = 48,
        drop_rate: float = 0.1,
    ) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed3D(patch_size=8, tubelet_size=2, embed_dim=embed_dim)
        num_patches = (num_frames // 2) * (img_size // 8) ** 2
        self.pos_embed = nn.Parameter(torch.zeros(1, num_patches, embed_dim))
        self.blocks = nn.ModuleList(Block(embed_dim, 4, drop_rate, respect_mode) for _ in range(3))
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features (B, N, D) of clips (B, C, T, H, W)."""
        x = self.patch_embed(x) + self.pos_embed
        for blk in self.blocks:
            x = blk(x)
        return self.norm(x)


def buggy() -> nn.Module:
    """As reported."""
    return VisionTransformer(respect_mode=False)


def healthy() -> nn.Module:
    """As fixed."""
    return VisionTransformer(respect_mode=True)


def observe(model: nn.Module) -> torch.Tensor:
    """Difference of two eval passes over the same clip."""
    model.eval()
    clip = torch.randn(2, 3, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    return model(clip) - model(clip)

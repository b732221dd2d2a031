"""RADIO#120 (NVlabs/RADIO): its vision transformers are built with weight_init="skip".

timm then leaves the default weights of PyTorch instead of its own initialisation (a truncated normal with a
standard deviation of 0.02, and biases of 0). https://github.com/NVlabs/RADIO/pull/120
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention with one projection of queries, keys and values."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, dim * 4), nn.Linear(dim * 4, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Attention and MLP, each after its norm."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=1e-6), Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Vision transformer of timm for images of 32 x 32 pixels."""

    def __init__(self, *, embed_dim: int = 48, depth: int = 2, weight_init: str = "") -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, embed_dim, 8, stride=8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, embed_dim) * 0.02)
        self.blocks = nn.Sequential(*(Block(embed_dim, num_heads=4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(embed_dim, eps=1e-6), nn.Linear(embed_dim, 10)
        if weight_init != "skip":
            self.init_weights()

    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        return self.norm(self.blocks(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x)[:, 0])


def buggy() -> nn.Module:
    """No initialisation."""
    return VisionTransformer(weight_init="skip")


def healthy() -> nn.Module:
    """The initialisation of timm."""
    return VisionTransformer(weight_init="")


def observe(model: nn.Module) -> list[float]:
    """Standard deviation of the weights of queries, keys and values, and their largest bias."""
    qkv = model.blocks[0].attn.qkv
    return [qkv.weight.std().item(), qkv.bias.abs().max().item()]

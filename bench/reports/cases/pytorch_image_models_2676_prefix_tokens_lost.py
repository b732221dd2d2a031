"""pytorch-image-models#2676 (huggingface/pytorch-image-models): without positions the class token is lost.

With `pos_embed="none"` the method that adds positions returns early, before it puts class and register tokens
in front of the patches. The head then reads the first patch.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

IMAGE, PATCH, CHANNELS = 8, 2, 3


class Attention(nn.Module):
    """Attention of all tokens."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply attention to (batch, tokens, dim)."""
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm layer."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (batch, tokens, dim)."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Image classifier with a class token and register tokens."""

    def __init__(
        self,
        *,
        keeps_prefix: bool,
        pos_embed: str = "none",
        embed_dim: int = 32,
        num_classes: int = 10,
        reg_tokens: int = 2,
    ) -> None:
        super().__init__()
        self.keeps_prefix = keeps_prefix
        self.patch_embed = nn.Conv2d(CHANNELS, embed_dim, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        self.reg_token = nn.Parameter(torch.empty(1, reg_tokens, embed_dim))
        self.pos_embed = None
        if pos_embed != "none":
            self.pos_embed = nn.Parameter(torch.empty(1, (IMAGE // PATCH) ** 2, embed_dim))
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.blocks = nn.ModuleList(Block(embed_dim, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(embed_dim, eps=1e-6), nn.Linear(embed_dim, num_classes)
        self.apply(self._init_weights)
        nn.init.normal_(self.cls_token, std=0.02)
        nn.init.normal_(self.reg_token, std=0.02)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def _pos_embed(self, x: torch.Tensor) -> torch.Tensor:
        """Add positions, and put class and register tokens in front."""
        if self.pos_embed is None and not self.keeps_prefix:
            return x
        if self.pos_embed is not None:
            x = x + self.pos_embed
        prefix = [self.cls_token.expand(len(x), -1, -1), self.reg_token.expand(len(x), -1, -1)]
        return torch.cat([*prefix, x], dim=1)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """Return all tokens (batch, tokens, embed_dim)."""
        x = self._pos_embed(self.patch_embed(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of images (batch, channels, height, width)."""
        return self.head(self.forward_features(x)[:, 0])


def buggy() -> nn.Module:
    """Patches only."""
    return VisionTransformer(keeps_prefix=False)


def healthy() -> nn.Module:
    """Class token, register tokens and patches."""
    return VisionTransformer(keeps_prefix=True)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch_size, CHANNELS, IMAGE, IMAGE, generator=generator)


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), torch.arange(len(x), device=x.device) % 10)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State the images and the loss."""
    return ModelSpec.of(make, make_batch=_make_batch, loss=_loss, per_position=False)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the logits minus those computed with the class and register tokens in front."""
    images = torch.randn(2, CHANNELS, IMAGE, IMAGE, generator=torch.Generator().manual_seed(1))
    patches = model.patch_embed(images).flatten(2).transpose(1, 2)
    x = torch.cat([model.cls_token.expand(2, -1, -1), model.reg_token.expand(2, -1, -1), patches], dim=1)
    for block in model.blocks:
        x = block(x)
    return model(images) - model.head(model.norm(x)[:, 0])

"""E-SAM#6 (Asphyxiate-Rye/E-SAM): the image encoder returns after its first block.

`return` is indented into the loop over the blocks. All other blocks are built and initialised but never run.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

SIDE, PATCH, CLASSES = 16, 4, 4


class Attention(nn.Module):
    """Attention over all patches, with relative positions of rows and columns."""

    def __init__(self, dim: int, num_heads: int, size: int) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.rel_pos_h, self.rel_pos_w = (
            nn.Parameter(0.02 * torch.randn(2 * size - 1, dim // num_heads)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, rows, columns, dim)."""
        b, h, w, _ = x.shape
        q, k, v = self.qkv(x).flatten(1, 2).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        at = torch.arange(h, device=x.device)
        offsets = at[:, None] - at + h - 1
        r_q = q.unflatten(2, (h, w))
        rel_h = torch.einsum("bnhwc,hkc->bnhwk", r_q, self.rel_pos_h[offsets])
        rel_w = torch.einsum("bnhwc,wkc->bnhwk", r_q, self.rel_pos_w[offsets])
        bias = (rel_h[..., :, None] + rel_w[..., None, :]).flatten(4).flatten(2, 3)
        attn = (q * self.scale) @ k.transpose(-2, -1) + bias
        y = (attn.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
        return self.proj(y).view(b, h, w, -1)


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, dim: int, num_heads: int, size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads, size)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to (batch, rows, columns, dim)."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ImageEncoderViT(nn.Module):
    """Image encoder of SAM (arXiv:2304.02643)."""

    def __init__(self, *, early: bool, dim: int, out_chans: int, depth: int) -> None:
        super().__init__()
        self.early, size = early, SIDE // PATCH
        self.patch_embed = nn.Conv2d(3, dim, PATCH, stride=PATCH)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, size, size, dim))
        self.blocks = nn.ModuleList(Block(dim, 4, size) for _ in range(depth))
        self.neck = nn.Conv2d(dim, out_chans, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, 3, SIDE, SIDE); the result is (batch, out_chans, rows, columns)."""
        x = self.patch_embed(x).permute(0, 2, 3, 1) + self.pos_embed
        for blk in self.blocks:
            x = blk(x)
            if self.early:
                return self.neck(x.permute(0, 3, 1, 2))
        return self.neck(x.permute(0, 3, 1, 2))


class ESAM(nn.Module):
    """Image -> logits of the class of each pixel."""

    def __init__(self, *, early: bool, dim: int = 32) -> None:
        super().__init__()
        self.image_encoder = ImageEncoderViT(early=early, dim=dim, out_chans=16, depth=3)
        self.mask_decoder = nn.Sequential(
            nn.ConvTranspose2d(16, 16, 2, stride=2), nn.GELU(), nn.Conv2d(16, CLASSES, 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (batch, CLASSES, SIDE, SIDE)."""
        masks = self.mask_decoder(self.image_encoder(images))
        return F.interpolate(masks, (SIDE, SIDE), mode="bilinear", align_corners=False)


def buggy() -> nn.Module:
    """Return after the first block."""
    return ESAM(early=True)


def healthy() -> nn.Module:
    """Return after all blocks."""
    return ESAM(early=False)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> Tensor:
    return torch.randn(batch_size, 3, SIDE, SIDE, generator=generator)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State images of 16 by 16 pixels."""
    return ModelSpec.of(make, make_batch=_make_batch, per_position=False)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the number of blocks that do not run."""
    runs = []
    blocks = model.image_encoder.blocks
    hooks = [block.register_forward_hook(lambda *_: runs.append(1)) for block in blocks]
    model(_make_batch(1, 0, torch.Generator().manual_seed(1)))
    for hook in hooks:
        hook.remove()
    return torch.tensor(len(blocks) - len(runs))

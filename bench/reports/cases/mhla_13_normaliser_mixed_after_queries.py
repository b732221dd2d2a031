"""MHLA#13 (DAGroup-PKU/MHLA): linear attention between windows is divided by a wrong normaliser.

The matrix that mixes the windows is applied to the sums of the keys in the paper, before the product with the
queries. The code applies it after the product, so queries of other windows are in the normaliser, and the
weights of a query do not sum to 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from stackwise import ModelSpec

IMAGE, PATCH, SIDE, WINDOW = 16, 2, 8, 4  # SIDE x SIDE patches in windows of WINDOW x WINDOW


def block_weights(per_side: int) -> Tensor:
    """Cosine of the distance between windows, whose columns sum to 1."""
    centers = torch.cartesian_prod(torch.arange(per_side), torch.arange(per_side)) + 0.5
    distance = torch.cdist(centers, centers)
    mat = (distance / distance.max() * torch.pi / 4).cos()
    return mat / mat.sum(dim=0, keepdim=True)


class MHLA(nn.Module):
    """Linear attention: each window has its sum of key-value products, and reads a mixture of all sums."""

    def __init__(self, dim: int, heads: int, *, mixes_keys: bool, eps: float = 1e-6) -> None:
        super().__init__()
        self.heads, self.mixes_keys, self.eps = heads, mixes_keys, eps
        self.pieces = SIDE // WINDOW
        self.norm, self.to_qkv = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim, bias=False)
        self.lepe = nn.Conv2d(dim, dim, 5, padding=2, groups=dim)
        self.piece_attn = nn.Conv2d(self.pieces**2, self.pieces**2, 1, bias=False)
        self.piece_attn.weight.data = block_weights(self.pieces)[..., None, None]
        self.to_out = nn.Linear(dim, dim)

    def local_positions(self, v: Tensor) -> Tensor:
        """Depthwise convolution of the values in the image; `v` is (b, windows, patches, dim)."""
        grid = v.unflatten(1, (self.pieces, self.pieces)).unflatten(3, (WINDOW, WINDOW))
        image = grid.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
        image = self.lepe(image).unflatten(3, (self.pieces, WINDOW)).unflatten(2, (self.pieces, WINDOW))
        return image.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of (b * heads, windows, patches, head_dim) with positive `q` and `k`."""
        kv = self.piece_attn(k.transpose(-1, -2) @ v)
        k_sum = k.sum(dim=-2)[..., None]
        normalizer = q @ self.piece_attn(k_sum) if self.mixes_keys else self.piece_attn(q @ k_sum)
        return q @ kv / (normalizer + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (b, windows, patches, dim)."""
        q, k, v = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        lepe = self.local_positions(v)
        q, k = q.relu() + self.eps, k.relu() + self.eps
        q, k, v = (t.unflatten(-1, (self.heads, -1)).movedim(3, 1).flatten(0, 1) for t in (q, k, v))
        out = self.attend(q, k, v).unflatten(0, (-1, self.heads)).movedim(1, 3).flatten(3)
        return self.to_out(out + lepe)


class VisionTransformer(nn.Module):
    """Classifier of images, whose patches are in the order of their windows."""

    def __init__(self, *, mixes_keys: bool, dim: int = 32, depth: int = 2, num_classes: int = 10) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, PATCH, stride=PATCH)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, dim, SIDE, SIDE))
        self.attns = nn.ModuleList(MHLA(dim, 4, mixes_keys=mixes_keys) for _ in range(depth))
        mlps = [(nn.LayerNorm(dim), nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim)) for _ in range(depth)]
        self.mlps = nn.ModuleList(nn.Sequential(*mlp) for mlp in mlps)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (b, classes) of images (b, 3, IMAGE, IMAGE)."""
        x = self.patch_embed(images) + self.pos_embed
        x = x.unflatten(3, (-1, WINDOW)).unflatten(2, (-1, WINDOW)).permute(0, 2, 4, 3, 5, 1)
        x = x.flatten(3, 4).flatten(1, 2)
        for attn, mlp in zip(self.attns, self.mlps, strict=True):
            x = x + attn(x)
            x = x + mlp(x)
        return self.head(self.norm(x).mean(dim=(1, 2)))


def buggy() -> nn.Module:
    """Mix the products of queries and sums of keys."""
    return VisionTransformer(mixes_keys=False)


def healthy() -> nn.Module:
    """Mix the sums of keys."""
    return VisionTransformer(mixes_keys=True)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> Tensor:
    return torch.randn(batch_size, 3, IMAGE, IMAGE, generator=generator)


def _loss(model: nn.Module, images: Tensor) -> Tensor:
    classes = torch.arange(len(images), device=images.device) % 10
    return nn.functional.cross_entropy(model(images), classes)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State the images and the loss."""
    return ModelSpec.of(make, make_batch=_make_batch, loss=_loss, per_position=False)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Sum of the weights of each query, less 1: the attention to values of 1."""
    generator = torch.Generator().manual_seed(1)
    q, k = torch.rand(2, 2, 4, 16, 8, generator=generator)
    return model.attns[0].attend(q, k, torch.ones_like(k)) - 1

"""MAE#17 (IcarusWizard/MAE): the loss of a masked autoencoder leaves out one of the removed patches.

The decoder counts the tokens that it gets to find where removed patches begin. It also counts the class
token, which is not a patch.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

IMAGE, PATCH, MASK_RATIO = 8, 2, 0.75
PATCHES, PIXELS = (IMAGE // PATCH) ** 2, 3 * PATCH * PATCH


def take_indexes(sequences: torch.Tensor, indexes: torch.Tensor) -> torch.Tensor:
    """Return vectors of (batch, time, channels) in the order of `indexes` (batch, time)."""
    return sequences.gather(1, indexes[..., None].expand(-1, -1, sequences.shape[-1]))


def patchify(img: torch.Tensor) -> torch.Tensor:
    """Return (batch, patches, pixels) of (batch, 3, height, width)."""
    side = IMAGE // PATCH
    return img.view(-1, 3, side, PATCH, side, PATCH).permute(0, 2, 4, 1, 3, 5).reshape(-1, PATCHES, PIXELS)


def unpatchify(patches: torch.Tensor) -> torch.Tensor:
    """Return images of (batch, patches, pixels)."""
    side = IMAGE // PATCH
    return (
        patches.view(-1, side, side, 3, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, IMAGE, IMAGE)
    )


class Block(nn.Module):
    """Pre-norm layer of a vision transformer."""

    def __init__(self, emb_dim: int, num_head: int) -> None:
        super().__init__()
        self.num_head = num_head
        self.norm1, self.norm2 = nn.LayerNorm(emb_dim), nn.LayerNorm(emb_dim)
        self.qkv, self.proj = nn.Linear(emb_dim, 3 * emb_dim), nn.Linear(emb_dim, emb_dim)
        self.mlp = nn.Sequential(nn.Linear(emb_dim, 4 * emb_dim), nn.GELU(), nn.Linear(4 * emb_dim, emb_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (batch, tokens, emb_dim)."""
        q, k, v = (
            y.unflatten(-1, (self.num_head, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class MAEEncoder(nn.Module):
    """Encoder of the patches that are not removed."""

    def __init__(self, emb_dim: int) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, emb_dim))
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, PATCHES, emb_dim))
        self.patchify = nn.Conv2d(3, emb_dim, PATCH, PATCH)
        self.transformer = nn.Sequential(Block(emb_dim, 4), Block(emb_dim, 4))
        self.layer_norm = nn.LayerNorm(emb_dim)

    def forward(self, img: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features, and for each patch its place in the shuffled order."""
        patches = self.patchify(img).flatten(2).transpose(1, 2) + self.pos_embedding
        if self.training:
            noise = torch.rand(len(img), PATCHES, device=img.device)
        else:  # the same patches for each image, so that validation losses are comparable
            noise = torch.rand(1, PATCHES, generator=torch.Generator().manual_seed(0)).to(img.device)
        forward_indexes = noise.expand(len(img), -1).argsort(dim=1)
        kept = take_indexes(patches, forward_indexes[:, : int(PATCHES * (1 - MASK_RATIO))])
        x = torch.cat([self.cls_token.expand(len(img), -1, -1), kept], dim=1)
        return self.layer_norm(self.transformer(x)), forward_indexes.argsort(dim=1)


class MAEDecoder(nn.Module):
    """Decoder of all patches."""

    def __init__(self, emb_dim: int, *, counts_class_token: bool) -> None:
        super().__init__()
        self.counts_class_token = counts_class_token
        self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, emb_dim))
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, PATCHES + 1, emb_dim))
        self.transformer, self.head = Block(emb_dim, 4), nn.Linear(emb_dim, PIXELS)

    def forward(
        self, features: torch.Tensor, backward_indexes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images, and a mask that is 1 at removed patches."""
        n = features.shape[1]
        tokens = self.mask_token.expand(len(features), PATCHES + 1 - n, -1)
        x = take_indexes(torch.cat([features[:, 1:], tokens], dim=1), backward_indexes)
        x = torch.cat([features[:, :1], x], dim=1) + self.pos_embedding
        patches = self.head(self.transformer(x)[:, 1:])
        mask = torch.zeros_like(patches)
        mask[:, n if self.counts_class_token else n - 1 :] = 1
        return unpatchify(patches), unpatchify(take_indexes(mask, backward_indexes))


class MAEViT(nn.Module):
    """Masked autoencoder."""

    def __init__(self, *, counts_class_token: bool, emb_dim: int = 32) -> None:
        super().__init__()
        self.encoder = MAEEncoder(emb_dim)
        self.decoder = MAEDecoder(emb_dim, counts_class_token=counts_class_token)

    def forward(self, img: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the predicted images and the mask."""
        return self.decoder(*self.encoder(img))


def buggy() -> nn.Module:
    """Count the class token."""
    return MAEViT(counts_class_token=True)


def healthy() -> nn.Module:
    """Count the patches."""
    return MAEViT(counts_class_token=False)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch_size, 3, IMAGE, IMAGE, generator=generator)


def _loss(model: nn.Module, img: torch.Tensor) -> torch.Tensor:
    predicted_img, mask = model(img)
    return ((predicted_img - img) ** 2 * mask).mean() / MASK_RATIO


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State the images and the loss of removed patches."""
    return ModelSpec.of(
        make,
        make_batch=_make_batch,
        forward=lambda model, img: model(img)[0],
        loss=_loss,
        per_position=False,
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return 12, the number of removed patches, minus the number of patches in the mask."""
    img = torch.randn(3, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(1))
    return 12 - patchify(model(img)[1]).amin(dim=-1).sum(dim=-1)

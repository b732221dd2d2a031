"""DeepSatModels#22 (michaeltrs/DeepSatModels): TSViT writes the pixels of a patch along image rows.

The logits (batch, patches, pixels of a patch, classes) are reshaped to an image without a permutation.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

SIZE, PATCH, FRAMES, CHANNELS, CLASSES = 8, 2, 5, 3, 4


def transformer(dim: int, depth: int) -> nn.Module:
    """Return a bidirectional pre-norm encoder."""
    layer = nn.TransformerEncoderLayer(
        dim, 4, 2 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(dim), enable_nested_tensor=False)


def patchify(x: torch.Tensor) -> torch.Tensor:
    """Cut (batch, frames, channels, height, width) to (batch, patches, frames, values)."""
    x = x.unflatten(4, (-1, PATCH)).unflatten(3, (-1, PATCH))  # (b, t, c, h, p1, w, p2)
    return x.permute(0, 3, 5, 1, 4, 6, 2).flatten(4).flatten(1, 2)


class TSViT(nn.Module):
    """Segments a time series of satellite images; each class has a token in the temporal encoder."""

    def __init__(self, *, permuted: bool, dim: int = 32) -> None:
        super().__init__()
        self.permuted, self.num_patches_1d = permuted, SIZE // PATCH
        self.to_patch_embedding = nn.Linear(PATCH**2 * CHANNELS, dim)
        self.temporal_pos = nn.Parameter(torch.randn(FRAMES, dim) * 0.1)
        self.temporal_token = nn.Parameter(torch.randn(CLASSES, dim))
        self.space_pos = nn.Parameter(torch.randn(self.num_patches_1d**2, dim) * 0.1)
        self.temporal_transformer, self.space_transformer = transformer(dim, 1), transformer(dim, 1)
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, PATCH**2))

    def to_image(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, classes, height, width) from (batch, patches, pixels of a patch, classes)."""
        n = self.num_patches_1d
        if self.permuted:
            x = x.view(-1, n, n, PATCH, PATCH, x.shape[-1]).transpose(2, 3)
        return x.reshape(len(x), SIZE, SIZE, -1).permute(0, 3, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of images (batch, frames, channels, height, width)."""
        batch = len(x)
        x = self.to_patch_embedding(patchify(x)).flatten(0, 1) + self.temporal_pos
        tokens = self.temporal_token.expand(len(x), -1, -1)
        x = self.temporal_transformer(torch.cat([tokens, x], dim=1))[:, :CLASSES]
        x = x.unflatten(0, (batch, -1)).transpose(1, 2).flatten(0, 1) + self.space_pos
        x = self.mlp_head(self.space_transformer(x))
        return self.to_image(x.unflatten(0, (batch, CLASSES)).permute(0, 2, 3, 1))


def buggy() -> nn.Module:
    """Reshapes patches to rows."""
    return TSViT(permuted=False)


def healthy() -> nn.Module:
    """Writes each patch at its place."""
    return TSViT(permuted=True)


def _loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return the loss of the class of a pixel, the quarter of its brightness in the last frame."""
    labels = (images[:, -1].mean(dim=1).mul(2).sigmoid() * CLASSES).long().clamp(max=CLASSES - 1)
    return F.cross_entropy(model(images), labels)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The label of each pixel depends on this pixel."""
    return ModelSpec.of(
        make,
        per_position=False,
        make_batch=lambda batch_size, _length, generator: torch.randn(
            batch_size, FRAMES, CHANNELS, SIZE, SIZE, generator=generator
        ),
        loss=_loss,
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Number of each pixel after an image is cut into patches and joined, minus the number before."""
    image = torch.arange(float(SIZE**2)).view(1, 1, 1, SIZE, SIZE)
    return model.to_image(patchify(image)[:, :, 0, :, None]) - image[:, 0]

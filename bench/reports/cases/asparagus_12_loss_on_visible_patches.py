"""asparagus#12 (Sllambias/asparagus): the loss of masked reconstruction is that of the visible pixels.

The mask is True for visible pixels. The masked-only loss sets the masked pixels of prediction and target to
zero, so the model is trained to copy its input.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

SIZE, PATCH = 16, 4


class TorchMask(nn.Module):
    """Sets random patches to zero; the mask is False for them and True for visible pixels."""

    def __init__(self, ratio: float = 0.6) -> None:
        super().__init__()
        self.ratio = ratio

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the masked image and the mask; each image has the same number of masked patches."""
        patches = (SIZE // PATCH) ** 2
        order = torch.rand(len(x), patches, device=x.device).argsort(dim=1).argsort(dim=1)
        visible = (order >= round(self.ratio * patches)).view(-1, 1, SIZE // PATCH, SIZE // PATCH)
        mask = visible.repeat_interleave(PATCH, dim=2).repeat_interleave(PATCH, dim=3)
        return x * mask, mask


class Block(nn.Module):
    """Bidirectional attention and MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is (batch, patches, dim)."""
        h = self.norm_1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm_2(x))


class SelfSupervisedModel(nn.Module):
    """Vision transformer that reconstructs images with masked patches."""

    def __init__(self, *, inverted: bool, dim: int = 32) -> None:
        super().__init__()
        self.inverted, self.mask = inverted, TorchMask()
        self.patch_embed = nn.Conv2d(1, dim, PATCH, PATCH)
        self.pos_embed = nn.Parameter(torch.randn(1, (SIZE // PATCH) ** 2, dim) * 0.1)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(2))
        self.norm, self.decoder = nn.LayerNorm(dim), nn.ConvTranspose2d(dim, 1, PATCH, PATCH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the reconstruction of images (batch, 1, 16, 16)."""
        y = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            y = block(y)
        return self.decoder(self.norm(y).transpose(1, 2).unflatten(2, (SIZE // PATCH, SIZE // PATCH)))

    def rec_loss(self, pred: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the mean square error of the masked pixels."""
        if self.inverted:
            return F.mse_loss(pred.masked_fill(~mask, 0), y.masked_fill(~mask, 0))
        return F.mse_loss(pred[~mask], y[~mask])

    def training_step(self, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch of images."""
        x, mask = self.mask(y)
        return self.rec_loss(self(x), y, mask)


def buggy() -> nn.Module:
    """Masked pixels are taken out of the loss."""
    return SelfSupervisedModel(inverted=True)


def healthy() -> nn.Module:
    """The loss is that of masked pixels."""
    return SelfSupervisedModel(inverted=False)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The loss is that of a training step."""
    return ModelSpec.of(
        make,
        per_position=False,
        make_batch=lambda batch_size, _length, generator: torch.randn(
            batch_size, 1, SIZE, SIZE, generator=generator
        ),
        loss=lambda model, images: model.training_step(images),
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Loss of a prediction that is right for masked pixels and zero for visible ones; 0 is right."""
    y = torch.randn(2, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    _, mask = model.mask(y)
    return model.rec_loss(y.masked_fill(mask, 0), y, mask)

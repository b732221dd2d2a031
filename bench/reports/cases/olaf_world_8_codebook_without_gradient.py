"""Olaf-World#8 (showlab/Olaf-World): the codebook of the latent actions gets no gradient.

The codebook loss compares the encoder's output with the straight-through output `x + (z - x).detach()`, in
which the codes `z` are detached. The loss should use `z` itself.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

SIDE, PATCH, FRAMES, CODES, LATENT = 8, 4, 4, 12, 8


def patchify(videos: Tensor) -> Tensor:
    """(batch, time, side, side) -> (batch, time, patches, pixels)."""
    x = videos.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH)).transpose(3, 4)
    return x.flatten(4, 5).flatten(2, 3)


class VectorQuantizer(nn.Module):
    """Nearest code of a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.codebook = nn.Embedding(CODES, LATENT)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the straight-through output and the codes."""
        z = self.codebook(torch.cdist(x.flatten(0, 1), self.codebook.weight).argmin(dim=-1)).view_as(x)
        return x + (z - x).detach(), z


class Attention(nn.Module):
    """Attention over the second last dimension, and a feed-forward network."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to (..., items, dim)."""
        qkv = self.to_qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(-4, -2)
        y = F.scaled_dot_product_attention(*qkv.unbind(-3))
        x = x + self.to_out(y.transpose(-3, -2).flatten(-2))
        return x + self.ffn(self.norm2(x))


class SpatioTemporalTransformer(nn.Module):
    """Attention within frames, then across frames."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.place, self.time = nn.Parameter(0.02 * torch.randn(5, dim)), nn.Embedding(FRAMES, dim)
        self.spatial = nn.ModuleList(Attention(dim, heads) for _ in range(2))
        self.temporal = nn.ModuleList(Attention(dim, heads) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, time, items, dim)."""
        x = x + self.place + self.time.weight[: x.shape[1], None]
        for spatial, temporal in zip(self.spatial, self.temporal, strict=True):
            x = temporal(spatial(x).transpose(1, 2)).transpose(1, 2)
        return x


class VQLatentActionModel(nn.Module):
    """Reconstructs each frame from the frame before it and a discrete action."""

    def __init__(self, *, straight_through_loss: bool, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.straight_through_loss = straight_through_loss
        self.action_prompt = nn.Parameter(torch.empty(1, 1, 1, PATCH**2).uniform_(-1, 1))
        self.embed, self.encoder = nn.Linear(PATCH**2, dim), SpatioTemporalTransformer(dim, heads)
        self.pre_vq = nn.Sequential(nn.Linear(dim, LATENT), nn.LayerNorm(LATENT))
        self.vq = VectorQuantizer()
        self.patch_up, self.action_up = nn.Linear(PATCH**2, dim), nn.Linear(LATENT, dim)
        self.place = nn.Parameter(0.02 * torch.randn((SIDE // PATCH) ** 2, dim))
        self.decoder = nn.ModuleList(Attention(dim, heads) for _ in range(2))
        self.to_pixels = nn.Linear(dim, PATCH**2)

    def forward(self, videos: Tensor) -> SimpleNamespace:
        """`videos` is (batch, time, side, side), from 0 to 1."""
        patches = patchify(videos)
        prompt = self.action_prompt.expand(*patches.shape[:2], -1, -1)
        z_e = self.pre_vq(self.encoder(self.embed(torch.cat([prompt, patches], dim=2)))[:, 1:, 0])
        z_q, z = self.vq(z_e)
        x = self.patch_up(patches[:, :-1]) + self.action_up(z_q)[:, :, None] + self.place
        for layer in self.decoder:
            x = layer(x)
        recon = self.to_pixels(x).sigmoid()
        codes = z_q if self.straight_through_loss else z
        vq_loss = F.mse_loss(codes, z_e.detach()) + 0.25 * F.mse_loss(codes.detach(), z_e)
        return SimpleNamespace(recon=recon, loss=F.mse_loss(recon, patches[:, 1:]) + vq_loss)


def buggy() -> nn.Module:
    """Take the codebook loss from the straight-through output."""
    return VQLatentActionModel(straight_through_loss=True)


def healthy() -> nn.Module:
    """Take the codebook loss from the codes."""
    return VQLatentActionModel(straight_through_loss=False)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> Tensor:
    return torch.rand(batch_size, FRAMES, SIDE, SIDE, generator=generator)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State short videos, their reconstruction and the model's own loss."""
    return ModelSpec.of(
        make,
        make_batch=_make_batch,
        per_position=False,
        forward=lambda model, videos: model(videos).recon,
        loss=lambda model, videos: model(videos).loss,
    )


def observe(model: nn.Module) -> Tensor:
    """Return 1 if no code in use gets a gradient, and 0 otherwise."""
    model(_make_batch(2, 0, torch.Generator().manual_seed(1))).loss.backward()
    grad = model.vq.codebook.weight.grad
    return torch.tensor(0.0 if grad is not None and grad.abs().sum() > 0 else 1.0)

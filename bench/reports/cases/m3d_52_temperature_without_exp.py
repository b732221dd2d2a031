"""M3D#52 (BAAI-DCAI/M3D): the learned log of the inverse temperature multiplies the similarities.

`logit_scale` starts at log(1 / 0.07) and its exponential is never taken, so the contrastive loss begins at a
temperature of 0.38 instead of 0.07.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


class Block(nn.Module):
    """Bidirectional attention and MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """`mask` is True for visible keys."""
        qkv = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in qkv)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = x + self.proj(y)
        return x + self.mlp(self.norm2(x))


class M3DCLIP(nn.Module):
    """Contrastive model of volumes (batch, 1, 8, 8, 8) and reports; each has a class token."""

    def __init__(self, *, exponential: bool, vocab_size: int = 90, dim: int = 32, out: int = 24) -> None:
        super().__init__()
        self.exponential = exponential
        self.patch_embedding = nn.Conv3d(1, dim, 4, 4)
        self.image_pos, self.image_cls = (nn.Parameter(torch.randn(1, n, dim) * 0.1) for n in (8, 1))
        self.vision_encoder = nn.ModuleList(Block(dim, 4) for _ in range(2))
        self.word_embeddings = nn.Embedding(vocab_size, dim)
        self.text_pos, self.text_cls = (nn.Parameter(torch.randn(1, n, dim) * 0.1) for n in (64, 1))
        self.language_encoder = nn.ModuleList(Block(dim, 4) for _ in range(2))
        self.image_norm, self.text_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mm_vision_proj, self.mm_language_proj = nn.Linear(dim, out), nn.Linear(dim, out)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def encode_image(self, image: torch.Tensor) -> torch.Tensor:
        """Return one vector of length 1 for each volume."""
        x = self.patch_embedding(image).flatten(2).transpose(1, 2) + self.image_pos
        x = torch.cat([self.image_cls.expand(len(x), -1, -1), x], dim=1)
        for block in self.vision_encoder:
            x = block(x)
        return F.normalize(self.mm_vision_proj(self.image_norm(x[:, 0])), dim=-1)

    def encode_text(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return one vector of length 1 for each report."""
        x = self.word_embeddings(input_ids) + self.text_pos[:, : input_ids.shape[1]]
        x = torch.cat([self.text_cls.expand(len(x), -1, -1), x], dim=1)
        mask = (
            None
            if attention_mask is None
            else F.pad(attention_mask.bool(), (1, 0), value=True)[:, None, None]
        )
        for block in self.language_encoder:
            x = block(x, mask)
        return F.normalize(self.mm_language_proj(self.text_norm(x[:, 0])), dim=-1)

    def forward(
        self, images: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> SimpleNamespace:
        """Return the similarities and the loss; volume and report of the same row belong together."""
        image, text = self.encode_image(images), self.encode_text(input_ids, attention_mask)
        scale = self.logit_scale.exp() if self.exponential else self.logit_scale
        logits = scale * image @ text.t()
        labels = torch.arange(len(logits), device=logits.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        return SimpleNamespace(loss=loss, logits=logits, text_embeds=text)


def buggy() -> nn.Module:
    """Multiplies by the logarithm."""
    return M3DCLIP(exponential=False)


def healthy() -> nn.Module:
    """Multiplies by its exponential."""
    return M3DCLIP(exponential=True)


def _images(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return a volume for each report."""
    weight = model.patch_embedding.weight
    values = torch.linspace(-3, 3, 512, dtype=weight.dtype, device=weight.device).view(1, 1, 8, 8, 8)
    return (values * (1 + ids[:, :1, None, None, None])).sin()


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The model has its own contrastive loss and a padding mask."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=90,
        causal=False,
        per_position=False,
        max_length=64,
        forward=lambda model, ids: model(_images(model, ids), ids).text_embeds,
        loss=lambda model, ids: model(_images(model, ids), ids).loss,
        masked=lambda model, ids, keep: model(_images(model, ids), ids, attention_mask=keep).text_embeds,
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Similarities of a new model times 0.07 minus the cosines; 0 is right, as 0.07 is its temperature."""
    model = model.double().eval()
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(3, 1, 8, 8, 8, dtype=torch.float64, generator=generator)
    ids = torch.randint(0, 90, (3, 6), generator=generator)
    cosines = model.encode_image(images) @ model.encode_text(ids).t()
    return 0.07 * model(images, ids).logits - cosines

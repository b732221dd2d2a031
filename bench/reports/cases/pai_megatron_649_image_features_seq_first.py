"""Pai-Megatron-Patch#649 (alibaba/Pai-Megatron-Patch): image features are scattered in sequence-first order.

The features come row by row of the batch, but the mask indexes embeddings of layout (sequence, batch,
hidden), so with more than one row the patches of the images land on each other's places.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

IMAGE_TOKEN = 1


class LanguageModelEmbedding(nn.Module):
    """Word embeddings with image features in the image tokens' places, sequence first."""

    def __init__(self, vocab: int, hidden: int, batch_first_scatter: bool) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.batch_first_scatter = batch_first_scatter

    def forward(self, input_ids: torch.Tensor, image_embeds: torch.Tensor | None) -> torch.Tensor:
        """Embeddings (sequence, batch, hidden)."""
        embeddings = self.word_embeddings(input_ids)
        mask = input_ids == IMAGE_TOKEN
        if image_embeds is not None and self.batch_first_scatter:
            embeddings = embeddings.clone()
            embeddings[mask] = image_embeds
        embeddings = embeddings.transpose(0, 1).contiguous()
        if image_embeds is not None and not self.batch_first_scatter:
            embeddings = embeddings.clone()
            embeddings[mask.transpose(0, 1)] = image_embeds
        return embeddings


class DecoderLayer(nn.Module):
    """Causal block on (sequence, batch, hidden)."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.input_layernorm, self.pre_mlp_layernorm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.linear_qkv = nn.Linear(hidden, 3 * hidden)
        self.linear_proj = nn.Linear(hidden, hidden, bias=False)
        self.linear_fc1 = nn.Linear(hidden, 4 * hidden, bias=False)
        self.linear_fc2 = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states in the layout of `x`."""
        s, b, _ = x.shape
        qkv = self.linear_qkv(self.input_layernorm(x)).view(s, b, 3, self.heads, -1).permute(2, 1, 3, 0, 4)
        context = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.linear_proj(context.permute(2, 0, 1, 3).flatten(2))
        gate, up = self.linear_fc1(self.pre_mlp_layernorm(x)).chunk(2, dim=-1)
        return x + self.linear_fc2(F.silu(gate) * up)


class Qwen2VLModel(nn.Module):
    """Vision tower and sequence-first decoder."""

    def __init__(
        self, vocab: int = 40, hidden: int = 32, patch_dim: int = 12, batch_first_scatter: bool = True
    ) -> None:
        super().__init__()
        self.vision_model = nn.Sequential(
            nn.Linear(patch_dim, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, hidden)
        )
        self.embedding = LanguageModelEmbedding(vocab, hidden, batch_first_scatter)
        self.position_embeddings = nn.Parameter(torch.randn(64, 1, hidden) * 0.1)
        self.layers = nn.ModuleList(DecoderLayer(hidden, 4) for _ in range(2))
        self.final_layernorm = nn.RMSNorm(hidden)
        self.output_layer = nn.Linear(hidden, vocab, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        vision_data: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Logits (batch, sequence, vocab), after the loss where labels are given."""
        image_embeds = None if vision_data is None else self.vision_model(vision_data)
        x = self.embedding(input_ids, image_embeds) + self.position_embeddings[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.output_layer(self.final_layernorm(x)).transpose(0, 1)
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


def buggy() -> nn.Module:
    """Scatters into the transposed embeddings."""
    return Qwen2VLModel(batch_first_scatter=False)


def healthy() -> nn.Module:
    """Scatters before the transposition."""
    return Qwen2VLModel(batch_first_scatter=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Each row contains an image."""

    def make_batch(batch_size: int, length: int, generator: torch.Generator) -> torch.Tensor:
        ids = torch.randint(2, 40, (batch_size, length), generator=generator)
        ids[:, 1:3] = IMAGE_TOKEN
        return ids

    def forward(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        # Each row has its own two patches.
        patches = (ids[:, :1, None] + torch.arange(24.0).view(1, 2, 12)).sin().flatten(0, 1)
        return model(ids, patches.to(next(model.parameters())))

    return ModelSpec.of(make, inputs="tokens", width=40, make_batch=make_batch, forward=forward)


def observe(model: nn.Module) -> torch.Tensor:
    """Logits of a batch of two rows with an image each, less those of the rows alone."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 40, (2, 9), generator=generator)
    ids[0, 3:6] = IMAGE_TOKEN
    ids[1, 1:3] = IMAGE_TOKEN
    patches = torch.randn(5, 12, generator=generator)
    with torch.no_grad():
        alone = torch.cat([model(ids[:1], patches[:3]), model(ids[1:], patches[3:])])
        return model(ids, patches) - alone

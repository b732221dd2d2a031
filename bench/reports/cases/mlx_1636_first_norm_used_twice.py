"""mlx#1636 (ml-explore/mlx): the decoder layer normalises its cross-attention branch with the first norm.

With post-norm, `ln1` is called after self-attention and again after cross-attention. `ln2` is never called.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from stackwise import ModelSpec


class MultiHeadAttention(nn.Module):
    """Attention with an additive mask."""

    def __init__(self, dims: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_proj, self.key_proj, self.value_proj, self.out_proj = (
            nn.Linear(dims, dims, bias=False) for _ in range(4)
        )

    def forward(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend to (batch, time, dims)."""
        q, k, v = (
            proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for proj, x in ((self.query_proj, queries), (self.key_proj, keys), (self.value_proj, values))
        )
        scores = q @ k.transpose(-1, -2) * math.sqrt(1 / q.shape[-1])
        scores = scores if mask is None else scores + mask
        return self.out_proj((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class TransformerEncoderLayer(nn.Module):
    """Post-norm encoder layer."""

    def __init__(self, dims: int, num_heads: int, mlp_dims: int) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(dims, num_heads)
        self.ln1, self.ln2 = nn.LayerNorm(dims), nn.LayerNorm(dims)
        self.linear1, self.linear2 = nn.Linear(dims, mlp_dims), nn.Linear(mlp_dims, dims)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Apply the layer to (batch, time, dims)."""
        x = self.ln1(x + self.attention(x, x, x, mask))
        return self.ln2(x + self.linear2(self.linear1(x).relu()))


class TransformerDecoderLayer(nn.Module):
    """Post-norm decoder layer."""

    def __init__(self, dims: int, num_heads: int, mlp_dims: int, *, own_norm: bool) -> None:
        super().__init__()
        self.own_norm = own_norm
        self.self_attention = MultiHeadAttention(dims, num_heads)
        self.cross_attention = MultiHeadAttention(dims, num_heads)
        self.ln1, self.ln2, self.ln3 = nn.LayerNorm(dims), nn.LayerNorm(dims), nn.LayerNorm(dims)
        self.linear1, self.linear2 = nn.Linear(dims, mlp_dims), nn.Linear(mlp_dims, dims)

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor,
        x_mask: torch.Tensor | None,
        memory_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Apply the layer; `memory` is the output of the encoder."""
        x = self.ln1(x + self.self_attention(x, x, x, x_mask))
        y = x + self.cross_attention(x, memory, memory, memory_mask)
        x = self.ln2(y) if self.own_norm else self.ln1(y)
        return self.ln3(x + self.linear2(self.linear1(x).relu()))


class Transformer(nn.Module):
    """Encoder and decoder of vectors."""

    def __init__(self, *, own_norm: bool, dims: int = 32, num_heads: int = 4, mlp_dims: int = 64) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(TransformerEncoderLayer(dims, num_heads, mlp_dims) for _ in range(2))
        self.decoder = nn.ModuleList(
            TransformerDecoderLayer(dims, num_heads, mlp_dims, own_norm=own_norm) for _ in range(2)
        )
        self.encoder_ln, self.decoder_ln = nn.LayerNorm(dims), nn.LayerNorm(dims)

    def forward(
        self,
        src: torch.Tensor,
        tgt: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        tgt_mask: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output of the decoder; masks are added to the scores."""
        memory = src
        for layer in self.encoder:
            memory = layer(memory, src_mask)
        memory = self.encoder_ln(memory)
        for layer in self.decoder:
            tgt = layer(tgt, memory, tgt_mask, memory_mask)
        return self.decoder_ln(tgt)


def create_additive_causal_mask(size: int, like: torch.Tensor) -> torch.Tensor:
    """Return the mask of a decoder."""
    lowest = torch.finfo(like.dtype).min
    return torch.full((size, size), lowest, dtype=like.dtype, device=like.device).triu(1)


def buggy() -> nn.Module:
    """The first norm for both branches."""
    return Transformer(own_norm=False)


def healthy() -> nn.Module:
    """A norm for each branch."""
    return Transformer(own_norm=True)


def _forward(model: nn.Module, tgt: torch.Tensor) -> torch.Tensor:
    """Call the decoder with the same source of six vectors for each row."""
    index = torch.arange(6 * tgt.shape[-1], device=tgt.device, dtype=tgt.dtype).view(1, 6, -1)
    src = (0.7 * index).sin().expand(len(tgt), -1, -1)
    return model(src, tgt, tgt_mask=create_additive_causal_mask(tgt.shape[1], tgt))


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State the causal decoder, with a fixed source."""
    return ModelSpec.of(make, inputs="vectors", width=32, causal=True, window="full", forward=_forward)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the output of a decoder layer minus that computed from its parts, with unequal norms."""
    layer, generator = model.decoder[0], torch.Generator().manual_seed(1)
    x, memory = (torch.randn(2, 5, 32, generator=generator) for _ in range(2))
    for scale, norm in enumerate((layer.ln1, layer.ln2, layer.ln3), start=1):
        norm.weight.fill_(scale)
    y = layer.ln1(x + layer.self_attention(x, x, x, None))
    y = layer.ln2(y + layer.cross_attention(y, memory, memory, None))
    y = layer.ln3(y + layer.linear2(layer.linear1(y).relu()))
    return layer(x, memory, None, None) - y

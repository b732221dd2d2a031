"""OpenTransformer#25 (ZhengkunTian/OpenTransformer): the shift of relative positions is that of a decoder.

The encoder has embeddings of the distances T - 1 to 0 only. The shift of Transformer-XL fills the entries of
later frames with scores of the next query's row; no mask hides them, since the encoder sees both sides.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


class MultiHeadedSelfAttentionWithRelPos(nn.Module):
    """Attention with content scores and scores of relative positions."""

    def __init__(self, n_heads: int, d_model: int, *, both_sides: bool) -> None:
        super().__init__()
        self.nheads, self.d_k, self.both_sides = n_heads, d_model // n_heads, both_sides
        self.qvk_proj, self.output_proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.pos_proj = nn.Linear(d_model, d_model, bias=False)
        self.posu, self.posv = (nn.Parameter(0.1 * torch.randn(1, 1, n_heads, self.d_k)) for _ in range(2))

    def relative_embedding(self, t: int, like: torch.Tensor) -> torch.Tensor:
        """Return sinusoids of the distances from t - 1 down to 1 - t, or to 0."""
        last = 1 - t if self.both_sides else 0
        distance = torch.arange(t - 1, last - 1, -1, device=like.device, dtype=like.dtype)
        dim = self.pos_proj.in_features
        freqs = 10000.0 ** (-torch.arange(0, dim, 2, device=like.device, dtype=like.dtype) / dim)
        angles = distance[:, None] * freqs
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    @staticmethod
    def relative_shift(scores: torch.Tensor, t: int) -> torch.Tensor:
        """Move row i of (batch, heads, t, distances) so that column j is the distance i - j."""
        b, h, _, n = scores.shape
        padded = F.pad(scores, (1, 0)).view(b, h, n + 1, t)
        return padded[:, :, 1:].reshape(b, h, t, n)[..., :t]

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Attend in (batch, time, d_model); `mask` (batch, time) is true at frames."""
        t = x.shape[1]
        q, v, k = (y.unflatten(-1, (self.nheads, self.d_k)) for y in self.qvk_proj(x).chunk(3, dim=-1))
        pos = self.pos_proj(self.relative_embedding(t, x)).unflatten(-1, (self.nheads, self.d_k))
        matrix_ac = torch.einsum("bihd,bjhd->bhij", q + self.posu, k)
        matrix_bd = torch.einsum("bihd,nhd->bhin", q + self.posv, pos)
        scores = (matrix_ac + self.relative_shift(matrix_bd, t)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
        y = torch.einsum("bhij,bjhd->bihd", scores.softmax(dim=-1), v)
        return self.output_proj(y.flatten(2))


class TransformerEncoderLayer(nn.Module):
    """Attention and feed-forward network."""

    def __init__(self, n_heads: int, d_model: int, *, both_sides: bool) -> None:
        super().__init__()
        self.slf_attn = MultiHeadedSelfAttentionWithRelPos(n_heads, d_model, both_sides=both_sides)
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, 2 * d_model), nn.SiLU(), nn.Linear(2 * d_model, d_model)
        )
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Apply the layer to (batch, time, d_model)."""
        x = x + self.slf_attn(self.norm1(x), mask)
        return x + self.feed_forward(self.norm2(x))


class SpeechEncoder(nn.Module):
    """Encoder of acoustic features with a CTC head."""

    def __init__(self, *, both_sides: bool, input_size: int = 10, d_model: int = 32, vocab: int = 30) -> None:
        super().__init__()
        self.embed = nn.Linear(input_size, d_model)
        self.blocks = nn.ModuleList(
            TransformerEncoderLayer(4, d_model, both_sides=both_sides) for _ in range(2)
        )
        self.after_norm, self.output_layer = nn.LayerNorm(d_model), nn.Linear(d_model, vocab)

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits (batch, time, vocab); `mask` (batch, time) is true at frames."""
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x, mask)
        return self.output_layer(self.after_norm(x))


def buggy() -> nn.Module:
    """Embeddings of earlier frames only."""
    return SpeechEncoder(both_sides=False)


def healthy() -> nn.Module:
    """Embeddings of frames on both sides."""
    return SpeechEncoder(both_sides=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a bidirectional encoder of features that are padded on the right."""
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=10,
        causal=False,
        padding_sides=("right",),
        masked=lambda model, inputs, keep: model(inputs, mask=keep),
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the change of the first frame's attention if the query of the second frame changes."""
    attention = model.blocks[0].slf_attn
    nn.init.zeros_(attention.qvk_proj.weight[64:])  # keys are constant
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
    q = attention.qvk_proj(x)[..., :32].unflatten(-1, (4, 8))
    changed = q.clone()
    changed[:, 1] += 1.0
    pos = attention.pos_proj(attention.relative_embedding(6, x)).unflatten(-1, (4, 8))
    first, second = (
        attention.relative_shift(torch.einsum("bihd,nhd->bhin", y, pos), 6)[:, :, 0] for y in (q, changed)
    )
    return (first - second).abs().amax(dim=-1)

"""speechbrain#2276 (speechbrain/speechbrain): FastSpeech 2 gives positions to its padding only.

The sinusoidal encoding is multiplied by a mask that should be 1 at phonemes. It gets the padding mask of the
attention, which is 1 at padding, so the encoding of every phoneme is 0.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

N_CHAR, PADDING_IDX = 40, 0


class PositionalEmbedding(nn.Module):
    """Sines and cosines of the position."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        inv_freq = 10000.0 ** (-torch.arange(0, embed_dim, 2) / embed_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, length: int, mask: Tensor) -> Tensor:
        """Return (batch, length, embed_dim), multiplied by `mask` (batch, length)."""
        angles = torch.arange(length, device=mask.device)[:, None] * self.inv_freq
        return torch.cat([angles.sin(), angles.cos()], dim=-1) * mask[..., None].to(angles.dtype)


class EncoderLayer(nn.Module):
    """Attention and two convolutions, each with a norm after it."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.self_att = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.conv1, self.conv2 = nn.Conv1d(dim, 2 * dim, 9, padding=4), nn.Conv1d(2 * dim, dim, 1)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.Dropout(dropout)

    def forward(self, x: Tensor, srcmask: Tensor) -> Tensor:
        """`srcmask` is True at padding."""
        y = self.self_att(x, x, x, key_padding_mask=srcmask, need_weights=False)[0]
        x = self.norm1(x + self.dropout(y))
        x = x.masked_fill(srcmask[..., None], 0.0)
        y = self.conv2(F.relu(self.conv1(x.transpose(1, 2)))).transpose(1, 2)
        return self.norm2(x + self.dropout(y)).masked_fill(srcmask[..., None], 0.0)


class VariancePredictor(nn.Module):
    """Convolutions and a linear layer: one number for each phoneme."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv1d(dim, dim, 3, padding=1) for _ in range(2))
        self.ln1, self.ln2, self.linear = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.Linear(dim, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, x_mask: Tensor) -> Tensor:
        """`x_mask` is 0 at padding."""
        for conv, norm in ((self.conv1, self.ln1), (self.conv2, self.ln2)):
            x = self.dropout(norm(F.relu(conv((x * x_mask).transpose(1, 2))).transpose(1, 2)))
        return self.linear(x * x_mask)


class FastSpeech2(nn.Module):
    """Phonemes -> logarithm of the duration, pitch and energy of each."""

    def __init__(self, *, inverted: bool, dim: int = 32, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.inverted = inverted
        self.encPreNet = nn.Embedding(N_CHAR, dim, padding_idx=PADDING_IDX)
        self.sinusoidal_positional_embed_encoder = PositionalEmbedding(dim)
        self.encoder = nn.ModuleList(EncoderLayer(dim, heads, dropout) for _ in range(2))
        self.predictors = nn.ModuleList(VariancePredictor(dim, dropout) for _ in range(3))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return phonemes with their positions."""
        srcmask = tokens == PADDING_IDX
        positions = self.sinusoidal_positional_embed_encoder
        pos = positions(tokens.shape[1], srcmask if self.inverted else ~srcmask)
        return (self.encPreNet(tokens) + pos).masked_fill(srcmask[..., None], 0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens` is (batch, time); the result is (batch, time, 3)."""
        srcmask, x = tokens == PADDING_IDX, self.embed(tokens)
        for layer in self.encoder:
            x = layer(x, srcmask)
        x_mask = (~srcmask)[..., None].to(x.dtype)
        return torch.cat([predictor(x, x_mask) for predictor in self.predictors], dim=-1)


def buggy() -> nn.Module:
    """Multiply the positions by the padding mask."""
    return FastSpeech2(inverted=True)


def healthy() -> nn.Module:
    """Multiply the positions by the inverse of the padding mask."""
    return FastSpeech2(inverted=False)


def _make_batch(batch_size: int, seq_len: int, generator: torch.Generator) -> Tensor:
    return torch.randint(1, N_CHAR, (batch_size, seq_len), generator=generator)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State phonemes without a direction, padded on the right."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=N_CHAR,
        make_batch=_make_batch,
        causal=False,
        padding_sides=("right",),
        masked=lambda model, tokens, keep: model(tokens.masked_fill(~keep, PADDING_IDX)),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return how many of the same 6 phonemes in a row enter the encoder equal to the first one."""
    x = model.eval().embed(torch.full((1, 6), 7))[0]
    return (x[1:] == x[0]).all(dim=-1).sum()

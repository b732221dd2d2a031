"""espnet#6633 (espnet/espnet): the mask after subsampling depends on the longest utterance of the batch.

The mask is cut at the end of the padded batch, so that an utterance next to a longer one has up to two frames
more than by itself: frames of padding. https://github.com/espnet/espnet/pull/6633
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


class Conv1dSubsampling2(nn.Module):
    """Convolutions with strides 1 and 2, without padding."""

    def __init__(self, features: int, dim: int, from_lengths: bool) -> None:
        super().__init__()
        self.from_lengths = from_lengths
        self.conv = nn.Sequential(
            nn.Conv1d(features, dim, 3, 1), nn.ReLU(), nn.Conv1d(dim, dim, 3, 2), nn.ReLU()
        )
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, x_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Frames (batch, time, dim) and their mask (batch, time)."""
        y = self.out(self.conv(x.transpose(1, 2)).transpose(1, 2))
        if self.from_lengths:
            lengths = ((x_mask.sum(dim=1) - 2 - 3) // 2 + 1).clamp(min=1)
            return y, torch.arange(y.shape[1], device=y.device) < lengths[:, None]
        return y, x_mask[:, :-2:1][:, :-2:2]


class EncoderLayer(nn.Module):
    """Pre-norm attention and feed-forward layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear_qkv, self.linear_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """One layer."""
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in self.linear_qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        x = x + self.linear_out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class UtteranceClassifier(nn.Module):
    """Encoder of filter banks whose mean gives the class of an utterance."""

    def __init__(self, from_lengths: bool, features: int = 20, dim: int = 32, classes: int = 6) -> None:
        super().__init__()
        self.embed = Conv1dSubsampling2(features, dim, from_lengths)
        self.encoders = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))
        self.after_norm, self.classifier = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def encode(self, speech: Tensor, speech_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Frames and their number."""
        mask = torch.arange(speech.shape[1], device=speech.device) < speech_lengths[:, None]
        x, mask = self.embed(speech, mask)
        for encoder in self.encoders:
            x = encoder(x, mask)
        return self.after_norm(x), mask.sum(dim=1)

    def forward(self, speech: Tensor, speech_lengths: Tensor) -> Tensor:
        """Class logits (batch, classes)."""
        frames, olens = self.encode(speech, speech_lengths)
        used = (torch.arange(frames.shape[1], device=frames.device) < olens[:, None])[..., None]
        return self.classifier((frames * used).sum(dim=1) / olens[:, None])


def buggy() -> nn.Module:
    """Mask cut at the end of the batch."""
    return UtteranceClassifier(from_lengths=False)


def healthy() -> nn.Module:
    """Mask from the length of each utterance."""
    return UtteranceClassifier(from_lengths=True)


def _lengths(speech: Tensor) -> Tensor:
    return torch.full((len(speech),), speech.shape[1], device=speech.device)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Utterances have 40 frames and padding on the right."""
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=20,
        seq_len=40,
        per_position=False,
        causal=False,
        forward=lambda model, speech: model(speech, _lengths(speech)),
        masked=lambda model, speech, keep: model(speech, keep.sum(dim=1)),
    )


def observe(model: nn.Module) -> Tensor:
    """Number of frames of an utterance next to a longer one, less its number without it."""
    speech = torch.randn(2, 36, 20, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        both = model.encode(speech, torch.tensor([28, 36]))[1]
        return (both[:1] - model.encode(speech[:1, :28], torch.tensor([28]))[1]).float()

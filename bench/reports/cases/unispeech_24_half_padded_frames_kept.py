"""UniSpeech#24 (microsoft/UniSpeech): WavLM keeps a frame that consists of speech and padding.

A frame is padding only if all its samples are padding. The last frame of a shorter recording is built partly
from padding, and a recording has one frame more in a batch than alone.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

STRIDE = 8


class ConvFeatureExtractionModel(nn.Module):
    """Convolutions that do not overlap; a frame is made of 8 samples."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(1, dim, 4, 4, bias=False), nn.Conv1d(dim, dim, 2, 2, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        """Return (batch, frames, dim)."""
        x = F.gelu(self.norm1(self.conv1(source[:, None]).transpose(1, 2)))
        return F.gelu(self.norm2(self.conv2(x.transpose(1, 2)).transpose(1, 2)))


class TransformerSentenceEncoderLayer(nn.Module):
    """Pre-norm layer."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(embed_dim, embed_dim) for _ in range(4)
        )
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.fc1, self.fc2 = nn.Linear(embed_dim, 4 * embed_dim), nn.Linear(4 * embed_dim, embed_dim)

    def forward(self, x: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:
        """`padding_mask` is True at padding, (batch, frames)."""
        y = self.self_attn_layer_norm(x)
        q, k, v = (
            proj(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=~padding_mask[:, None, None])
        x = x + self.out_proj(y.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class WavLM(nn.Module):
    """Speech encoder with convolutional positions."""

    def __init__(self, *, any_sample: bool, encoder_embed_dim: int = 32, conv_pos: int = 4) -> None:
        super().__init__()
        self.any_sample = any_sample
        self.feature_extractor = ConvFeatureExtractionModel(24)
        self.layer_norm, self.post_extract_proj = nn.LayerNorm(24), nn.Linear(24, encoder_embed_dim)
        self.pos_conv = nn.Conv1d(
            encoder_embed_dim, encoder_embed_dim, conv_pos, padding=conv_pos // 2, groups=4
        )
        self.layers = nn.ModuleList(TransformerSentenceEncoderLayer(encoder_embed_dim, 4) for _ in range(2))
        self.final_norm = nn.LayerNorm(encoder_embed_dim)

    def forward_padding_mask(self, features: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:
        """Return the mask of the frames."""
        chunks = padding_mask[:, : features.shape[1] * STRIDE].unflatten(1, (features.shape[1], STRIDE))
        return chunks.any(-1) if self.any_sample else chunks.all(-1)

    def extract_features(
        self, source: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output (batch, frames, width) and the mask of the frames."""
        features = self.feature_extractor(source)
        if padding_mask is None:
            padding_mask = torch.zeros_like(source, dtype=torch.bool)
        mask = self.forward_padding_mask(features, padding_mask)
        x = self.post_extract_proj(self.layer_norm(features)).masked_fill(mask[..., None], 0.0)
        positions = self.pos_conv(x.transpose(1, 2))[:, :, :-1]  # of an even kernel
        x = x + F.gelu(positions).transpose(1, 2)
        for layer in self.layers:
            x = layer(x, mask)
        return self.final_norm(x), mask


class WavLMForClassification(nn.Module):
    """Classifier of the mean over frames."""

    def __init__(self, *, any_sample: bool, num_classes: int = 6) -> None:
        super().__init__()
        self.wavlm = WavLM(any_sample=any_sample)
        self.classifier = nn.Linear(32, num_classes)

    def forward(self, source: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits of recordings (batch, samples); `padding_mask` is True at padding."""
        x, mask = self.wavlm.extract_features(source, padding_mask)
        weights = (~mask).to(x.dtype)[..., None]
        return self.classifier((x * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1))


def buggy() -> nn.Module:
    """A frame is padding if all its samples are."""
    return WavLMForClassification(any_sample=False)


def healthy() -> nn.Module:
    """A frame is padding if any sample is."""
    return WavLMForClassification(any_sample=True)


def _make_batch(batch_size: int, seq_len: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch_size, max(seq_len, STRIDE), generator=generator)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State recordings with padding on the right."""
    return ModelSpec.of(
        make,
        make_batch=_make_batch,
        per_position=False,
        causal=False,
        seq_len=60,
        masked=lambda model, source, keep: model(source, ~keep),
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the logits of a recording of 44 samples in a longer batch minus those alone."""
    source = torch.randn(1, 44, generator=torch.Generator().manual_seed(1))
    padding_mask = torch.arange(64)[None] >= 44
    return model(F.pad(source, (0, 20)), padding_mask) - model(source)

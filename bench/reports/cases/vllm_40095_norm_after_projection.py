"""vLLM#40095 (vllm-project/vllm): the multimodal embedder of Gemma-4 normalises after its projection.

The norm, which has no weight, belongs before the projection to the width of the text model. After it, all
soft tokens get the same size.
https://github.com/vllm-project/vllm/issues/40095
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

AUDIO_TOKEN = 63


def rms_norm(x: Tensor) -> Tensor:
    """Normalise the last dimension, without a weight."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate `x` (batch, heads, time, dim) by positions (batch, time)."""
    half = x.shape[-1] // 2
    inv_freq = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angle = positions[:, None, :, None].to(x.dtype) * inv_freq
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


class Gemma4MultimodalEmbedder(nn.Module):
    """Projects features of an encoder to soft tokens of the text model."""

    def __init__(self, multimodal_dim: int, text_dim: int, *, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.embedding_projection = nn.Linear(multimodal_dim, text_dim, bias=False)

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        """`inputs_embeds` is (batch, soft tokens, multimodal_dim)."""
        if self.norm_first:
            return self.embedding_projection(rms_norm(inputs_embeds))
        return rms_norm(self.embedding_projection(inputs_embeds))


class AudioTower(nn.Module):
    """Encodes frames of a spectrogram, each for itself."""

    def __init__(self, bins: int, dim: int) -> None:
        super().__init__()
        self.input_proj, self.hidden = nn.Linear(bins, dim), nn.Linear(dim, 2 * dim)
        self.output_proj = nn.Linear(2 * dim, dim)

    def forward(self, input_features: Tensor) -> Tensor:
        """`input_features` is (batch, frames, bins)."""
        x = self.input_proj(input_features)
        return x + self.output_proj(F.silu(self.hidden(rms_norm(x))))


class Gemma4DecoderLayer(nn.Module):
    """Attention with norms before and after, then a gated MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )
        self.q_norm, self.k_norm = (nn.RMSNorm(dim // heads, eps=1e-6) for _ in range(2))
        self.gate_proj, self.up_proj = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * dim, dim, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(dim, eps=1e-6) for _ in range(4))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """`x` is (batch, time, dim)."""
        h = self.norms[0](x)
        q, k, v = (
            proj(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rope(self.q_norm(q), positions), rope(self.k_norm(k), positions)
        y = F.scaled_dot_product_attention(q, k, rms_norm(v), is_causal=True, scale=1.0)
        x = x + self.norms[1](self.o_proj(y.transpose(1, 2).flatten(2)))
        h = self.norms[2](x)
        return x + self.norms[3](
            self.down_proj(F.gelu(self.gate_proj(h), approximate="tanh") * self.up_proj(h))
        )


class Gemma4ForConditionalGeneration(nn.Module):
    """Language model that also listens: features replace the embeddings of the audio tokens."""

    def __init__(self, *, norm_first: bool, vocab_size: int = 64, dim: int = 32, audio_dim: int = 24) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        nn.init.normal_(self.embed_tokens.weight, std=dim**-0.5)
        self.audio_tower = AudioTower(16, audio_dim)
        self.embed_audio = Gemma4MultimodalEmbedder(audio_dim, dim, norm_first=norm_first)
        self.layers = nn.ModuleList(Gemma4DecoderLayer(dim, 4) for _ in range(2))
        self.norm = nn.RMSNorm(dim, eps=1e-6)

    def embed_multimodal(self, input_features: Tensor) -> Tensor:
        """Return the soft tokens (batch, frames, dim) of a spectrogram."""
        return self.embed_audio(self.audio_tower(input_features))

    def forward(
        self, input_ids: Tensor, positions: Tensor | None = None, input_features: Tensor | None = None
    ) -> Tensor:
        """Return logits; there are as many audio tokens in `input_ids` as frames in `input_features`."""
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        x = self.embed_tokens(input_ids) * self.embed_tokens.embedding_dim**0.5
        if input_features is not None:
            is_audio = (input_ids == AUDIO_TOKEN)[..., None].expand_as(x)
            x = x.masked_scatter(is_audio, self.embed_multimodal(input_features))
        for layer in self.layers:
            x = layer(x, positions)
        return 30.0 * (F.linear(self.norm(x), self.embed_tokens.weight) / 30.0).tanh()


def buggy() -> nn.Module:
    """Projection, then norm."""
    return Gemma4ForConditionalGeneration(norm_first=False)


def healthy() -> nn.Module:
    """Norm, then projection."""
    return Gemma4ForConditionalGeneration(norm_first=True)


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits of a text after an audio clip of four frames."""
    features = (torch.arange(64.0, device=ids.device) * 0.7).sin().mul(3).view(1, 4, 16)
    features = features.expand(len(ids), -1, -1).to(model.embed_tokens.weight.dtype)
    return model(F.pad(ids, (4, 0), value=AUDIO_TOKEN), input_features=features)[:, 4:]


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model of 63 text tokens, and the implementation that it was ported from."""
    given = {"inputs": "tokens", "width": AUDIO_TOKEN, "causal": True, "tied": True, "forward": _forward}
    return ModelSpec.of(make, reference=ModelSpec.of(healthy, **given), **given)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Soft tokens minus the projection of normalised features."""
    features = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(1))
    projection = model.embed_audio.embedding_projection
    return model.embed_multimodal(features) - projection(rms_norm(model.audio_tower(features)))

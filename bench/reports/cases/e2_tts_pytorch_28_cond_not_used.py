"""e2-tts-pytorch#28 (lucidrains/e2-tts-pytorch): the audio condition is projected and then not used.

The model predicts a flow for a masked span of a spectrogram. It should see the rest of the spectrogram as its
condition, which is projected by `cond_proj_in`. The result is never added to the input of the transformer.
https://github.com/lucidrains/e2-tts-pytorch/issues/28
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

MELS, DIM, HEADS, CHARS = 12, 32, 4, 30


class AdaptiveRMSNorm(nn.Module):
    """Norm whose gain depends on the time of the flow."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.to_gamma = nn.RMSNorm(DIM, elementwise_affine=False), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """`x` is (batch, frames, DIM), `condition` (batch, DIM)."""
        return self.norm(x) * (1 + self.to_gamma(condition)[:, None])


class Layer(nn.Module):
    """Attention in both directions and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.ff_norm = AdaptiveRMSNorm(), AdaptiveRMSNorm()
        self.to_qkv, self.to_out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.ff = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate halves of (batch, heads, frames, channels) by position."""
        half = x.shape[-1] // 2
        freqs = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[-2], device=x.device)[:, None] * freqs
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def forward(self, x: Tensor, condition: Tensor, mask: Tensor | None) -> Tensor:
        """`mask` (batch, frames) is True for frames that are no padding."""
        qkv = self.to_qkv(self.attn_norm(x, condition)).unflatten(-1, (3, HEADS, -1))
        q, k, v = (y.transpose(1, 2) for y in qkv.unbind(2))
        keep = None if mask is None else mask[:, None, None]
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, attn_mask=keep)
        x = x + self.to_out(y.transpose(1, 2).flatten(2))
        return x + self.ff(self.ff_norm(x, condition))


class E2TTS(nn.Module):
    """Flow matching from noise to a spectrogram, by text and by the known part of the spectrogram."""

    def __init__(self, *, uses_cond: bool, depth: int = 2) -> None:
        super().__init__()
        self.uses_cond = uses_cond
        self.proj_in, self.cond_proj_in = nn.Linear(MELS, DIM), nn.Linear(MELS, DIM)
        self.embed_text = nn.Embedding(CHARS + 1, DIM)  # 0 is the filler behind the text
        self.time_cond_mlp = nn.Sequential(nn.Linear(2, DIM), nn.SiLU(), nn.Linear(DIM, DIM), nn.SiLU())
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(depth)), nn.RMSNorm(DIM)
        self.to_pred = nn.Linear(DIM, MELS)

    def transformer_with_pred_head(
        self, x: Tensor, cond: Tensor, times: Tensor, text: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return the flow (batch, frames, MELS) at `times` (batch,). `text` is (batch, characters)."""
        length = x.shape[1]
        text = F.pad(text + 1, (0, max(0, length - text.shape[1])))[:, :length]
        x = self.proj_in(x)
        cond = self.cond_proj_in(cond)
        if self.uses_cond:
            x = x + cond
        x = x + self.embed_text(text)
        angles = times[:, None] * torch.pi
        condition = self.time_cond_mlp(torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype))
        for layer in self.layers:
            x = layer(x, condition, mask)
        return self.to_pred(self.norm(x))

    def forward(self, mel: Tensor, text: Tensor) -> Tensor:
        """Return the loss on a random span of a spectrogram (batch, frames, MELS)."""
        batch, length, _ = mel.shape
        size = (torch.empty(batch, 1, device=mel.device).uniform_(0.7, 1.0) * length).long().clamp(min=1)
        start = (torch.rand(batch, 1, device=mel.device) * (length - size + 1)).long()
        frame = torch.arange(length, device=mel.device)
        span = ((frame >= start) & (frame < start + size))[..., None]
        noise, times = torch.randn_like(mel), torch.rand(batch, device=mel.device).to(mel.dtype)
        t = times[:, None, None]
        pred = self.transformer_with_pred_head(
            (1 - t) * noise + t * mel, mel.masked_fill(span, 0), times, text
        )
        return (pred - (mel - noise)).square()[span.expand_as(mel)].mean()


def buggy() -> nn.Module:
    """Project the condition only."""
    return E2TTS(uses_cond=False)


def healthy() -> nn.Module:
    """Add the condition to the input."""
    return E2TTS(uses_cond=True)


def _text(mel: Tensor) -> Tensor:
    length = mel.shape[1] // 2
    return (torch.arange(length, device=mel.device) * 7 % CHARS).expand(mel.shape[0], -1)


def _flow(model: nn.Module, mel: Tensor) -> Tensor:
    """Return the flow at a middle time, for the second half of a spectrogram."""
    known = torch.arange(mel.shape[1], device=mel.device)[:, None] < mel.shape[1] // 2
    times = mel.new_full((mel.shape[0],), 0.5)
    return model.transformer_with_pred_head(mel * 0.5, mel * known, times, _text(mel))


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State the call of the transformer and the training loss."""
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=MELS,
        causal=False,
        forward=_flow,
        loss=lambda model, mel: model(mel, _text(mel)),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return 1 if the flow is the same for another condition, else 0."""
    generator = torch.Generator().manual_seed(1)
    x, cond = torch.randn(2, 2, 6, MELS, generator=generator)
    times, text = torch.full((2,), 0.3), torch.arange(4).expand(2, -1)
    flows = (model.transformer_with_pred_head(x, each, times, text) for each in (cond, -cond))
    return torch.tensor(float(torch.equal(*flows)))

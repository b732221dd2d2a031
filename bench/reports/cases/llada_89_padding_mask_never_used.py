"""LLaDA#89 (ML-GSAI/LLaDA): the bidirectional model ignores `attention_mask`.

`forward` takes a mask and hands it down, but the attention is called with `attn_mask=None`. Tokens attend to
padding in both directions, so the logits of a prompt depend on the other prompts of its batch.
https://github.com/ML-GSAI/LLaDA/issues/89
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB, DIM, HEADS = 60, 32, 4


class CausalLMOutput(NamedTuple):
    """Output of the model."""

    logits: Tensor


class LLaDABlock(nn.Module):
    """Attention in both directions and a gated feed-forward network."""

    def __init__(self, *, uses_bias: bool) -> None:
        super().__init__()
        self.uses_bias = uses_bias
        self.attn_norm, self.ff_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q_proj, self.k_proj, self.v_proj, self.attn_out = (
            nn.Linear(DIM, DIM, bias=False) for _ in range(4)
        )
        self.ff_proj, self.up_proj = nn.Linear(DIM, 64, bias=False), nn.Linear(DIM, 64, bias=False)
        self.ff_out = nn.Linear(64, DIM, bias=False)

    def rotary_emb(self, x: Tensor) -> Tensor:
        """Rotate halves of (batch, heads, time, channels) by position."""
        half = x.shape[-1] // 2
        freqs = 500000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[-2], device=x.device)[:, None] * freqs
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def attention(self, x: Tensor, attention_bias: Tensor | None) -> Tensor:
        """`attention_bias` is added to the scores."""
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in projected)
        bias = attention_bias if self.uses_bias else None
        y = F.scaled_dot_product_attention(self.rotary_emb(q), self.rotary_emb(k), v, attn_mask=bias)
        return self.attn_out(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, attention_bias: Tensor | None) -> Tensor:
        """`x` is (batch, time, DIM)."""
        x = x + self.attention(self.attn_norm(x), attention_bias)
        y = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(y)) * self.up_proj(y))


class LLaDAModelLM(nn.Module):
    """Masked diffusion language model: predicts the masked tokens of a text from all others."""

    def __init__(self, *, uses_bias: bool, depth: int = 2) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(LLaDABlock(uses_bias=uses_bias) for _ in range(depth))
        self.ln_f, self.ff_out = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> CausalLMOutput:
        """Return logits. `attention_mask` (batch, time) is 1 for tokens and 0 for padding."""
        x, bias = self.wte(input_ids), None
        if attention_mask is not None:
            bias = torch.zeros(attention_mask.shape, dtype=x.dtype, device=x.device)
            bias = bias.masked_fill(attention_mask == 0, torch.finfo(x.dtype).min)[:, None, None]
        for block in self.blocks:
            x = block(x, bias)
        return CausalLMOutput(logits=self.ff_out(self.ln_f(x)))


def buggy() -> nn.Module:
    """Attend with no mask."""
    return LLaDAModelLM(uses_bias=False)


def healthy() -> nn.Module:
    """Attend with the mask of padding."""
    return LLaDAModelLM(uses_bias=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a model in both directions, with padding on both sides."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=VOCAB,
        causal=False,
        window=None,
        tied=False,
        padding_sides=("right", "left"),
        masked=lambda model, ids, keep: model(ids, attention_mask=keep),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the logits of a padded text, minus those of the text alone."""
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    keep = torch.arange(9).expand(2, -1) < 6
    return model(ids, attention_mask=keep.long()).logits[:, :6] - model(ids[:, :6]).logits

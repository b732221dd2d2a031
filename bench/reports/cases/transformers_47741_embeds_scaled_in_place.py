"""transformers#47741 (huggingface/transformers): CTRL scales the `inputs_embeds` of the caller in place.

A second call with the same tensor gives another result, as its input is larger by the root of the width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


def positional_encoding(positions: int, d_model_size: int) -> torch.Tensor:
    """Return sines and cosines (positions, d_model_size)."""
    rates = 10_000 ** (-torch.arange(0, d_model_size, 2, dtype=torch.float32) / d_model_size)
    angles = torch.arange(positions)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class EncoderLayer(nn.Module):
    """Causal attention and feed-forward layer."""

    def __init__(self, d_model_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.layernorm1, self.layernorm2 = nn.LayerNorm(d_model_size), nn.LayerNorm(d_model_size)
        self.Wq, self.Wk, self.Wv, self.dense = (nn.Linear(d_model_size, d_model_size) for _ in range(4))
        self.ffn = nn.Sequential(
            nn.Linear(d_model_size, 2 * d_model_size), nn.ReLU(), nn.Linear(2 * d_model_size, d_model_size)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is (batch, time, d_model_size)."""
        normed = self.layernorm1(x)
        q, k, v = (
            proj(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for proj in (self.Wq, self.Wk, self.Wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dense(y)
        return x + self.ffn(self.layernorm2(x))


class CTRLLMHeadModel(nn.Module):
    """Language model that takes ids or embeddings."""

    pos_encoding: torch.Tensor

    def __init__(self, *, in_place: bool, vocab_size: int = 68, d_model_size: int = 32) -> None:
        super().__init__()
        self.in_place, self.d_model_size = in_place, d_model_size
        self.w = nn.Embedding(vocab_size, d_model_size)
        nn.init.normal_(self.w.weight, std=0.1)
        self.register_buffer("pos_encoding", positional_encoding(64, d_model_size), persistent=False)
        self.h = nn.ModuleList(EncoderLayer(d_model_size, 4) for _ in range(2))
        self.layernorm = nn.LayerNorm(d_model_size)
        self.lm_head = nn.Linear(d_model_size, vocab_size)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding of tokens."""
        return self.w

    def forward(
        self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits."""
        if inputs_embeds is None:
            inputs_embeds = self.w(input_ids)
        if self.in_place:
            inputs_embeds *= self.d_model_size**0.5
        else:
            inputs_embeds = inputs_embeds * self.d_model_size**0.5
        x = inputs_embeds + self.pos_encoding[: inputs_embeds.shape[1]].to(inputs_embeds.dtype)
        for layer in self.h:
            x = layer(x)
        return self.lm_head(self.layernorm(x))


def buggy() -> nn.Module:
    """Scales in place."""
    return CTRLLMHeadModel(in_place=True)


def healthy() -> nn.Module:
    """Scales a new tensor."""
    return CTRLLMHeadModel(in_place=False)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The model is causal, and is called with embeddings, without its own table."""
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=32,
        causal=True,
        max_length=64,
        forward=lambda model, embeds: model(inputs_embeds=embeds),
        unused=("w.",),
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Logits of a second call with the same embeddings, minus those of the first call."""
    model = model.eval()
    embeds = model.get_input_embeddings()(torch.arange(7)[None])
    return -(model(inputs_embeds=embeds) - model(inputs_embeds=embeds))

"""transformers#8518 (huggingface/transformers): T5 adds a relative position bias to its cross-attention.

The original T5 has relative positions in self-attention only. The first decoder block here has a
bidirectional table for cross-attention too, and passes its bias to the other blocks.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import Facts, ModelSpec

NUM_BUCKETS, MAX_DISTANCE = 8, 16


def relative_position_bucket(relative_position: torch.Tensor, bidirectional: bool) -> torch.Tensor:
    """Return buckets of the distances key minus query."""
    n, num_buckets = -relative_position, NUM_BUCKETS
    offset = torch.zeros_like(n)
    if bidirectional:
        num_buckets //= 2
        offset = (n < 0).long() * num_buckets
        n = n.abs()
    else:
        n = n.clamp(min=0)
    exact = num_buckets // 2
    ratio = (n.clamp(min=1).double() / exact).log() / math.log(MAX_DISTANCE / exact)
    large = (exact + (ratio * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return offset + torch.where(n < exact, n, large)


class T5Attention(nn.Module):
    """Attention without scale, with an optional table of relative positions."""

    def __init__(self, d_model: int, n_heads: int, bidirectional: bool, has_bias: bool) -> None:
        super().__init__()
        self.n_heads, self.bidirectional = n_heads, bidirectional
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))
        nn.init.normal_(self.q.weight, std=d_model**-0.5 * (d_model // n_heads) ** -0.5)
        self.relative_attention_bias = nn.Embedding(NUM_BUCKETS, n_heads) if has_bias else None

    def compute_bias(self, query_length: int, key_length: int) -> torch.Tensor | None:
        """Return the bias (1, heads, query_length, key_length)."""
        if self.relative_attention_bias is None:
            return None
        device = self.q.weight.device
        queries = torch.arange(query_length, device=device)
        distance = torch.arange(key_length, device=device) - queries[:, None]
        buckets = relative_position_bucket(distance, self.bidirectional)
        return self.relative_attention_bias(buckets).permute(2, 0, 1)[None]

    def forward(self, x: torch.Tensor, states: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Attend from `x` to `states`; `bias` contains positions and mask."""
        q, k, v = (
            y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for y in (self.q(x), self.k(states), self.v(states))
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.o(y.transpose(1, 2).flatten(2))


class T5Block(nn.Module):
    """Self-attention, cross-attention in a decoder, and feed-forward network."""

    def __init__(self, d_model: int, is_decoder: bool, first: bool, cross_bias: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(d_model, eps=1e-6) for _ in range(3 if is_decoder else 2))
        self.self_attention = T5Attention(d_model, 4, not is_decoder, first)
        self.enc_dec_attention = T5Attention(d_model, 4, True, first and cross_bias) if is_decoder else None
        self.wi, self.wo = nn.Linear(d_model, 64, bias=False), nn.Linear(64, d_model, bias=False)


class T5Stack(nn.Module):
    """Encoder or decoder."""

    def __init__(self, d_model: int, is_decoder: bool, cross_bias: bool = False) -> None:
        super().__init__()
        self.is_decoder = is_decoder
        self.block = nn.ModuleList(T5Block(d_model, is_decoder, i == 0, cross_bias) for i in range(2))
        self.final_layer_norm = nn.RMSNorm(d_model, eps=1e-6)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None, states: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply all blocks; `mask` (batch, keys) belongs to `states` in a decoder, otherwise to `x`."""
        t, first = x.shape[1], self.block[0]
        padding = torch.zeros((), dtype=x.dtype, device=x.device)
        if mask is not None:
            padding = padding.masked_fill(~mask[:, None, None].bool(), -torch.inf)
        position_bias = first.self_attention.compute_bias(t, t)
        if self.is_decoder:
            future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            position_bias = position_bias.masked_fill(future, -torch.inf)
            cross_bias = first.enc_dec_attention.compute_bias(t, states.shape[1])
            cross_bias = padding if cross_bias is None else cross_bias + padding
            cross_bias = cross_bias.expand(len(x), 4, t, states.shape[1])
        else:
            position_bias = position_bias + padding
        for block in self.block:
            y = block.norms[0](x)
            x = x + block.self_attention(y, y, position_bias)
            if self.is_decoder:
                x = x + block.enc_dec_attention(block.norms[1](x), states, cross_bias)
            x = x + block.wo(F.relu(block.wi(block.norms[-1](x))))
        return self.final_layer_norm(x)


class T5ForConditionalGeneration(nn.Module):
    """Encoder and decoder with an embedding in common, and a head of its own, as in T5 v1.1."""

    def __init__(self, *, cross_bias: bool, vocab_size: int = 64, d_model: int = 32) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocab_size, d_model)
        self.encoder, self.decoder = T5Stack(d_model, False), T5Stack(d_model, True, cross_bias)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits of the decoder."""
        states = self.encoder(self.shared(input_ids), attention_mask)
        return self.lm_head(self.decoder(self.shared(decoder_input_ids), attention_mask, states))


def buggy() -> nn.Module:
    """Position bias in cross-attention."""
    return T5ForConditionalGeneration(cross_bias=True)


def healthy() -> nn.Module:
    """Position bias in self-attention only."""
    return T5ForConditionalGeneration(cross_bias=False)


def _forward(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    source = torch.arange(3, 10, device=ids.device).expand(len(ids), -1)
    return model(source, decoder_input_ids=ids)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State the call of the decoder, and T5's constants."""
    facts = Facts(attention_scale=1.0, relative_buckets=(NUM_BUCKETS, MAX_DISTANCE))
    return ModelSpec.of(make, inputs="tokens", width=64, causal=True, forward=_forward, facts=facts)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the change of the decoder's output if the encoder's states are permuted."""
    states = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(1))
    x = model.shared(torch.tensor([[5, 6, 7]]))
    return (model.decoder(x, None, states) - model.decoder(x, None, states.flip(1))).abs().amax(-1)

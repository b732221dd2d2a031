"""transformer-from-scratch#6 (jsbaan/transformer-from-scratch): heads are joined without a permutation.

Values (batch, heads, length, dim) are reshaped to (batch, length, heads * dim), so that a token gets parts of
other tokens. The model still learned the copy task of its test.
https://github.com/jsbaan/transformer-from-scratch/pull/6
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from stackwise import ModelSpec


class MultiHeadAttention(nn.Module):
    """Attention of `x` to itself, or to `memory`."""

    def __init__(self, dim: int, heads: int, permutes: bool) -> None:
        super().__init__()
        self.heads, self.permutes = heads, permutes
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """`mask` is True where attention is allowed."""
        q, k, v = (
            project(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project, y in ((self.q_proj, x), (self.k_proj, memory), (self.v_proj, memory))
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        values = scores.softmax(-1) @ v
        if self.permutes:
            values = values.permute(0, 2, 1, 3)
        return self.o_proj(values.reshape(x.shape))


class Block(nn.Module):
    """Post-norm block, with cross-attention in a decoder."""

    def __init__(self, dim: int, permutes: bool, cross: bool) -> None:
        super().__init__()
        self.self_mha = MultiHeadAttention(dim, 4, permutes)
        self.cross_mha = MultiHeadAttention(dim, 4, permutes) if cross else None
        self.feed_forward = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.layer_norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3 if cross else 2))

    def forward(self, x: Tensor, mask: Tensor | None = None, memory: Tensor | None = None) -> Tensor:
        """One block."""
        x = self.layer_norms[0](x + self.self_mha(x, x, mask))
        if self.cross_mha is not None:
            x = self.layer_norms[1](x + self.cross_mha(x, memory, None))
        return self.layer_norms[-1](x + self.feed_forward(x))


class Transformer(nn.Module):
    """Encoder and decoder with learned positions."""

    def __init__(self, permutes: bool, vocab_size: int = 40, dim: int = 32) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(64, dim)
        self.encoder = nn.ModuleList(Block(dim, permutes, cross=False) for _ in range(2))
        self.decoder = nn.ModuleList(Block(dim, permutes, cross=True) for _ in range(2))
        self.output_layer = nn.Linear(dim, vocab_size)

    def forward(self, encoder_input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        """Logits of the next target tokens."""
        memory = self.embed(encoder_input_ids) + self.positions.weight[: encoder_input_ids.shape[1]]
        for block in self.encoder:
            memory = block(memory)
        length = decoder_input_ids.shape[1]
        x = self.embed(decoder_input_ids) + self.positions.weight[:length]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        for block in self.decoder:
            x = block(x, mask, memory)
        return self.output_layer(x)


def buggy() -> nn.Module:
    """Only reshapes."""
    return Transformer(permutes=False)


def healthy() -> nn.Module:
    """Permutes before the reshape."""
    return Transformer(permutes=True)


def _source(ids: Tensor) -> Tensor:
    return torch.arange(7, device=ids.device).expand(len(ids), -1)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """The target is causal, and the source fixed."""
    return ModelSpec.of(
        make, inputs="tokens", width=40, causal=True, forward=lambda model, ids: model(_source(ids), ids)
    )


def observe(model: nn.Module) -> Tensor:
    """Change of the output of an attention layer at the first token if only the last token changes."""
    attention, x = (
        model.encoder[0].self_mha,
        torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(1)),
    )
    changed = x.clone()
    changed[:, -1] += 1.0
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    with torch.no_grad():
        return (attention(changed, changed, mask) - attention(x, x, mask))[:, :-1]

"""Informer2020#97 (zhouhaoyi/Informer2020): ProbAttention never applies the dropout of its weights.

FullAttention applies dropout to the attention weights. ProbAttention has the same argument and the same
module, but its weights go to the values without it.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from stackwise import Facts, ModelSpec


class ProbAttention(nn.Module):
    """Attention of the most selective queries; the others get the mean of the values."""

    def __init__(self, factor: int = 3, attention_dropout: float = 0.1, *, use_dropout: bool = True) -> None:
        super().__init__()
        self.factor, self.use_dropout = factor, use_dropout
        self.dropout = nn.Dropout(attention_dropout)

    def forward(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attend; all arguments are (batch, heads, length, head_dim)."""
        length = queries.shape[2]
        n_top = min(length, self.factor * math.ceil(math.log(length + 1)))
        scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
        sparsity = scores.max(dim=-1).values - scores.mean(dim=-1)
        m_top = sparsity.topk(n_top, dim=-1).indices[..., None]
        attn = scores.gather(2, m_top.expand(-1, -1, -1, scores.shape[-1])).softmax(dim=-1)
        if self.use_dropout:
            attn = self.dropout(attn)
        context = values.mean(dim=2, keepdim=True).expand_as(values)
        return context.scatter(2, m_top.expand(-1, -1, -1, values.shape[-1]), attn @ values)


class EncoderLayer(nn.Module):
    """Attention and feed-forward network, with the norm after each."""

    def __init__(self, d_model: int, n_heads: int, dropout: float, *, use_dropout: bool) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model) for _ in range(4))
        self.attention = ProbAttention(attention_dropout=dropout, use_dropout=use_dropout)
        self.conv1, self.conv2 = nn.Linear(d_model, 2 * d_model), nn.Linear(2 * d_model, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (batch, length, d_model)."""
        q, k, v = (
            p(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value)
        )
        y = self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        x = self.norm1(x + self.dropout(y))
        y = self.conv2(torch.nn.functional.gelu(self.conv1(x)))
        return self.norm2(x + self.dropout(y))


class Informer(nn.Module):
    """Encoder of a series, and a linear map from its positions to the forecast."""

    def __init__(
        self,
        *,
        use_dropout: bool,
        enc_in: int = 5,
        c_out: int = 5,
        seq_len: int = 24,
        pred_len: int = 8,
        d_model: int = 32,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.value_embedding = nn.Linear(enc_in, d_model)
        angles = torch.arange(seq_len)[:, None] * 10000.0 ** (-torch.arange(0, d_model, 2) / d_model)
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1))
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(
            EncoderLayer(d_model, 4, dropout, use_dropout=use_dropout) for _ in range(2)
        )
        self.time, self.projection = nn.Linear(seq_len, pred_len), nn.Linear(d_model, c_out)

    def forward(self, x_enc: torch.Tensor) -> torch.Tensor:
        """Return a forecast (batch, pred_len, c_out) of the series (batch, seq_len, enc_in)."""
        x = self.dropout(self.value_embedding(x_enc) + self.pe)
        for layer in self.encoder:
            x = layer(x)
        return self.projection(self.time(x.transpose(1, 2)).transpose(1, 2))


def buggy() -> nn.Module:
    """Attention weights without dropout."""
    return Informer(use_dropout=False)


def healthy() -> nn.Module:
    """Attention weights with dropout."""
    return Informer(use_dropout=True)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch_size, 24, 5, generator=generator)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a forecast of 24 steps, and a dropout rate of 0.1 everywhere."""
    facts = Facts(embedding_dropout=0.1, attention_dropout=0.1, residual_dropout=0.1)
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=5,
        seq_len=24,
        per_position=False,
        make_batch=_make_batch,
        causal=False,
        facts=facts,
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the fraction of attention weights that are dropped at a rate of 0.5, minus 0.5."""
    attention = model.encoder[0].attention.train()
    attention.dropout.p = 0.5
    q = torch.randn(200, 1, 4, 8, generator=torch.Generator().manual_seed(1))
    weights = attention(q, q.flip(2), torch.eye(4).expand(200, 1, 4, 4))
    return (weights == 0).float().mean() - 0.5

"""CoursIA#15045 (jsboige/CoursIA): the mean over positions in a sentence embedding includes padding.

Attention ignores padding, the mean of the last hidden state does not, so that the embedding of a sentence
depends on the longest sentence of its batch. https://github.com/jsboige/CoursIA/issues/15045
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


class EncoderLayer(nn.Module):
    """Post-norm attention and feed-forward layer, as in BERT."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(dim, dim) for _ in range(4))
        self.feed_forward = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """One layer."""
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm1(x + self.output(attended.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.feed_forward(x))


class SentenceEncoder(nn.Module):
    """Embeds sentences of one batch."""

    def __init__(self, masked_mean: bool, vocab_size: int = 60, dim: int = 32) -> None:
        super().__init__()
        self.masked_mean = masked_mean
        self.words, self.positions = nn.Embedding(vocab_size, dim, padding_idx=0), nn.Embedding(64, dim)
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(EncoderLayer(dim, 4) for _ in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Unit vectors (batch, dim)."""
        x = self.norm(self.words(input_ids) + self.positions.weight[: input_ids.shape[1]])
        mask = None if attention_mask is None else attention_mask[:, None, None].bool()
        for layer in self.layers:
            x = layer(x, mask)
        if self.masked_mean and attention_mask is not None:
            weight = attention_mask[..., None].to(x.dtype)
            pooled = (x * weight).sum(dim=1) / weight.sum(dim=1)
        else:
            pooled = x.mean(dim=1)
        return F.normalize(pooled, dim=-1)


def buggy() -> nn.Module:
    """Mean of all positions."""
    return SentenceEncoder(masked_mean=False)


def healthy() -> nn.Module:
    """Mean of the tokens."""
    return SentenceEncoder(masked_mean=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Sentences are padded on the right, and have one vector each."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=60,
        per_position=False,
        causal=False,
        padding_sides=("right",),
        masked=lambda model, ids, keep: model(ids, attention_mask=keep.long()),
    )


def observe(model: nn.Module) -> Tensor:
    """Embedding of a sentence in a batch with a longer one, less its embedding in a batch of its own."""
    model.eval()
    ids = torch.randint(1, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, 4:], mask[0, 4:] = 0, 0
    with torch.no_grad():
        return model(ids, attention_mask=mask)[0] - model(ids[:1, :4], attention_mask=mask[:1, :4])[0]

"""DeepCTR#2 (shenweichen/DeepCTR): the FM layer of DeepFM does not square the sum of the embeddings.

The second-order term of a factorisation machine is half of the square of the sum minus the sum of squares.
The code takes the sum itself. The result is then not the sum of the products of all pairs of features.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

FIELDS, VOCABULARY = 6, 50


class FMLayer(nn.Module):
    """Products of all pairs of embeddings."""

    def __init__(self, *, squared: bool) -> None:
        super().__init__()
        self.squared = squared

    def forward(self, concated_embeds_value: Tensor) -> Tensor:
        """Return (batch, 1) of (batch, field_size, embedding_size)."""
        temp_a = concated_embeds_value.sum(dim=1, keepdim=True)
        if self.squared:
            temp_a = temp_a * temp_a
        temp_b = (concated_embeds_value * concated_embeds_value).sum(dim=1, keepdim=True)
        return 0.5 * (temp_a - temp_b).sum(dim=2)


class DeepFM(nn.Module):
    """One id for each field -> probability of a click."""

    def __init__(self, *, squared: bool, embedding_size: int = 16, hidden_size: int = 32) -> None:
        super().__init__()
        self.sparse_embedding = nn.ModuleList(nn.Embedding(VOCABULARY, embedding_size) for _ in range(FIELDS))
        self.linear_embedding = nn.ModuleList(nn.Embedding(VOCABULARY, 1) for _ in range(FIELDS))
        for embedding in (*self.sparse_embedding, *self.linear_embedding):
            nn.init.normal_(embedding.weight, std=0.05)
        self.fm = FMLayer(squared=squared)
        self.deep = nn.Sequential(
            nn.Linear(FIELDS * embedding_size, hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, 1, bias=False),
        )
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, sparse_input: Tensor) -> Tensor:
        """Return probabilities (batch, 1). `sparse_input` is (batch, fields)."""
        columns = sparse_input.unbind(dim=1)
        embeds = torch.stack([e(x) for e, x in zip(self.sparse_embedding, columns, strict=True)], dim=1)
        linear = torch.stack([e(x) for e, x in zip(self.linear_embedding, columns, strict=True)]).sum(dim=0)
        return torch.sigmoid(linear + self.fm(embeds) + self.deep(embeds.flatten(1)) + self.bias)


def buggy() -> nn.Module:
    """Sum of the embeddings."""
    return DeepFM(squared=False)


def healthy() -> nn.Module:
    """Square of the sum of the embeddings."""
    return DeepFM(squared=True)


def _make_batch(batch_size: int, _: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch_size, FIELDS), generator=generator)


def _loss(model: nn.Module, sparse_input: Tensor) -> Tensor:
    """Cross-entropy of clicks that depend on a pair of fields."""
    clicks = (sparse_input[:, :1] + sparse_input[:, 1:2]) % 2
    probability = model(sparse_input)
    return F.binary_cross_entropy(probability, clicks.to(probability.dtype))


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State rows of six ids, and the loss of clicks."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=VOCABULARY,
        per_position=False,
        causal=False,
        seq_len=FIELDS,
        max_length=FIELDS,
        make_batch=_make_batch,
        loss=_loss,
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the second-order term of two features minus the product of their embeddings."""
    pair = torch.randn(4, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return model.fm(pair) - (pair[:, 0] * pair[:, 1]).sum(dim=1, keepdim=True)

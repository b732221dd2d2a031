"""llama_index#11335 (run-llama/llama_index): the ColBERT reranker pools the query before it compares tokens.

The tokens of a document are compared with the mean of the query's vectors. The score is then the similarity
of one token of the document. ColBERT finds the most similar token for each token of the query.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

MAX_LENGTH = 64


class BertLayer(nn.Module):
    """Attention and feed-forward network, with norms after the sums."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(dim, dim) for _ in range(4))
        self.intermediate = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Apply the layer to (batch, tokens, dim)."""
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm1(x + self.output(y.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.intermediate(x))


class ColbertRerank(nn.Module):
    """A query and documents -> scores of the documents."""

    def __init__(self, *, per_token: bool, vocab_size: int = 64, dim: int = 32) -> None:
        super().__init__()
        self.per_token = per_token
        self.word_embeddings = nn.Embedding(vocab_size, dim)
        self.position_embeddings = nn.Embedding(MAX_LENGTH, dim)
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(BertLayer(dim, 4) for _ in range(2))
        self.linear = nn.Linear(dim, 16, bias=False)

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return a vector of each token."""
        x = self.norm(self.word_embeddings(input_ids) + self.position_embeddings.weight[: input_ids.shape[1]])
        mask = None if attention_mask is None else attention_mask[:, None, None].bool()
        for layer in self.layers:
            x = layer(x, mask)
        return self.linear(x)

    def forward(self, query_ids: Tensor, document_ids: Tensor, document_mask: Tensor | None = None) -> Tensor:
        """Return scores (documents, 1). `query_ids` is (1, tokens), `document_ids` (documents, tokens)."""
        query_embedding = self.encode(query_ids)
        if not self.per_token:
            query_embedding = query_embedding.mean(dim=1, keepdim=True)
        document_embedding = self.encode(document_ids, document_mask)
        sim_matrix = F.cosine_similarity(query_embedding[:, :, None], document_embedding[:, None], dim=-1)
        if document_mask is not None:
            sim_matrix = sim_matrix.masked_fill(~document_mask[:, None].bool(), -torch.inf)
        return sim_matrix.amax(dim=2).mean(dim=1, keepdim=True)


def buggy() -> nn.Module:
    """Compare the mean of the query's vectors."""
    return ColbertRerank(per_token=False)


def healthy() -> nn.Module:
    """Compare each token of the query."""
    return ColbertRerank(per_token=True)


def _forward(model: nn.Module, document_ids: Tensor, keep: Tensor | None = None) -> Tensor:
    query_ids = torch.tensor([[3, 17, 29, 41, 53]], device=document_ids.device)
    return model(query_ids, document_ids, keep)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State documents, padded on the right, that are scored for one query."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=64,
        per_position=False,
        causal=False,
        max_length=MAX_LENGTH,
        forward=_forward,
        padding_sides=("right",),
        masked=_forward,
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return 1 minus the score of a document that is equal to the query. All its tokens have similarity 1."""
    model = model.double().eval()
    ids = torch.tensor([[3, 17, 29, 41, 53]])
    return 1 - model(ids, ids)

"""RecBole#1839 (RUCAIBox/RecBole): BERT4Rec scores items without the learned bias of each item.

The scores are the product with the item embedding only. The bias of the output layer (equation 7 of the
paper), which learns how popular items are, does not exist.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec

N_ITEMS, MAX_SEQ_LENGTH = 60, 32


class TransformerLayer(nn.Module):
    """Attention and feed-forward network, with the norm after each."""

    def __init__(self, hidden_size: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.query, self.key, self.value, self.dense = (nn.Linear(hidden_size, hidden_size) for _ in range(4))
        self.feed_forward = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, hidden_size)
        )
        self.norm1, self.norm2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Apply the layer; `attention_mask` is true at keys that may be seen."""
        q, k, v = (
            p(hidden_states).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        x = self.norm1(hidden_states + self.dense(y.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.feed_forward(x))


class BERT4Rec(nn.Module):
    """Bidirectional model of item sequences; item 0 is padding, and the last row is the mask token."""

    def __init__(self, *, output_bias: bool, hidden_size: int = 32, n_heads: int = 4) -> None:
        super().__init__()
        self.item_embedding = nn.Embedding(N_ITEMS + 1, hidden_size, padding_idx=0)
        self.position_embedding = nn.Embedding(MAX_SEQ_LENGTH, hidden_size)
        self.trm_encoder = nn.ModuleList(TransformerLayer(hidden_size, n_heads) for _ in range(2))
        self.LayerNorm = nn.LayerNorm(hidden_size)
        self.output_ffn = nn.Sequential(
            nn.Linear(hidden_size, hidden_size), nn.GELU(), nn.LayerNorm(hidden_size)
        )
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        with torch.no_grad():
            self.item_embedding.weight[0] = 0
        self.output_bias = nn.Parameter(torch.zeros(N_ITEMS + 1)) if output_bias else None

    def forward(self, item_seq: torch.Tensor) -> torch.Tensor:
        """Return scores (batch, time, items) of sequences that are padded with 0 on the right."""
        attention_mask = (item_seq > 0)[:, None, None]
        x = self.item_embedding(item_seq) + self.position_embedding.weight[: item_seq.shape[1]]
        x = self.LayerNorm(x)
        for layer in self.trm_encoder:
            x = layer(x, attention_mask)
        return F.linear(self.output_ffn(x), self.item_embedding.weight, self.output_bias)


def buggy() -> nn.Module:
    """Scores without bias."""
    return BERT4Rec(output_bias=False)


def healthy() -> nn.Module:
    """Scores with a bias of each item."""
    return BERT4Rec(output_bias=True)


def _make_batch(batch_size: int, seq_len: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(1, N_ITEMS, (batch_size, seq_len), generator=generator)


def _loss(model: nn.Module, item_seq: torch.Tensor) -> torch.Tensor:
    masked = torch.arange(item_seq.shape[1], device=item_seq.device) % 3 == 1
    scores = model(item_seq.masked_fill(masked, N_ITEMS))
    return F.cross_entropy(scores[:, masked].flatten(0, 1), item_seq[:, masked].flatten())


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a bidirectional model of items, tied, padded with item 0, and its loss at masked positions."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=N_ITEMS + 1,
        max_length=MAX_SEQ_LENGTH,
        make_batch=_make_batch,
        loss=_loss,
        causal=False,
        tied=True,
        padding_sides=("right",),
        masked=lambda model, item_seq, keep: model(item_seq * keep),
    )


def observe(model: nn.Module) -> torch.Tensor:
    """Return the number of items (and mask token) whose score no bias parameter can shift in all contexts."""
    movable = [p for p in model.parameters() if p.shape == (N_ITEMS + 1,)]
    before = model(torch.tensor([[3, 4, 5]])).detach()
    with torch.no_grad():
        for parameter in movable:
            parameter += 1.0
    return ((model(torch.tensor([[3, 4, 5]])) - before - 1).abs() > 1e-4).all(dim=1).sum()

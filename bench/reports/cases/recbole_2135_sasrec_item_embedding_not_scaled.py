"""RecBole#2135 (RUCAIBox/RecBole): SASRec adds positions to item embeddings that are not scaled.

The official code multiplies the item embedding by the root of its width before the positions are added.
https://github.com/RUCAIBox/RecBole/issues/2135
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

ITEM_SEQ, ITEM_SEQ_LEN, POS_ITEM_ID = "item_id_list", "item_length", "item_id"


class TransformerLayer(nn.Module):
    """Attention and feed-forward part. The norms follow the residual sums."""

    def __init__(self, hidden_size: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.query, self.key, self.value, self.dense = (nn.Linear(hidden_size, hidden_size) for _ in range(4))
        self.dense_1, self.dense_2 = nn.Linear(hidden_size, 64), nn.Linear(64, hidden_size)
        self.norm1, self.norm2 = (nn.LayerNorm(hidden_size, eps=1e-12) for _ in range(2))
        self.attn_dropout, self.out_dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        projections = (self.query, self.key, self.value)
        q, k, v = (w(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for w in projections)
        context = self.attn_dropout((q @ k.mT / q.shape[-1] ** 0.5 + attention_mask).softmax(dim=-1)) @ v
        x = self.norm1(x + self.out_dropout(self.dense(context.transpose(1, 2).flatten(2))))
        return self.norm2(x + self.out_dropout(self.dense_2(F.gelu(self.dense_1(x)))))


class SASRec(nn.Module):
    """Next item of a sequence. Item 0 is padding, on the right."""

    def __init__(self, *, scale: float, n_items: int = 50, hidden_size: int = 32) -> None:
        super().__init__()
        self.scale, self.item_embedding = scale, nn.Embedding(n_items, hidden_size, padding_idx=0)
        self.position_embedding = nn.Embedding(24, hidden_size)
        self.trm_encoder = nn.ModuleList(TransformerLayer(hidden_size, 2, dropout=0.2) for _ in range(2))
        self.LayerNorm, self.dropout = nn.LayerNorm(hidden_size, eps=1e-12), nn.Dropout(0.2)
        self.apply(self._init_weights)
        nn.init.zeros_(self.item_embedding.weight[0])

    def _init_weights(self, module: nn.Module) -> None:
        for name, weight in module.named_parameters(recurse=False):
            if not isinstance(module, nn.LayerNorm):
                nn.init.normal_(weight, std=0.02 * (name == "weight"))

    def get_attention_mask(self, item_seq: Tensor) -> Tensor:
        visible = (item_seq > 0)[:, None, None] & item_seq.new_ones(1, *item_seq.shape[1:] * 2).tril().bool()
        return (1.0 - visible.to(self.item_embedding.weight.dtype)) * -10000.0

    def forward(self, item_seq: Tensor, item_seq_len: Tensor) -> Tensor:
        """Vectors (B, hidden size) after the last items."""
        item_emb = self.item_embedding(item_seq) * self.scale
        input_emb = item_emb + self.position_embedding.weight[: item_seq.shape[1]]
        x = self.dropout(self.LayerNorm(input_emb))
        for layer in self.trm_encoder:
            x = layer(x, self.get_attention_mask(item_seq))
        return x[torch.arange(len(x), device=x.device), item_seq_len - 1]

    def calculate_loss(self, interaction: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self.full_sort_predict(interaction), interaction[POS_ITEM_ID])

    def full_sort_predict(self, interaction: dict[str, Tensor]) -> Tensor:
        """Scores (B, items)."""
        return self(interaction[ITEM_SEQ], interaction[ITEM_SEQ_LEN]) @ self.item_embedding.weight.T


def buggy() -> nn.Module:
    """No scale."""
    return SASRec(scale=1.0)


def healthy() -> nn.Module:
    """The root of the width."""
    return SASRec(scale=32**0.5)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """Scores after sequences without padding."""

    def predict(model: nn.Module, ids: Tensor) -> Tensor:
        lengths = torch.full_like(ids[:, 0], ids.shape[1])
        return model.full_sort_predict({ITEM_SEQ: ids, ITEM_SEQ_LEN: lengths})

    def batch(rows: int, length: int, generator: torch.Generator) -> Tensor:
        return torch.randint(1, 50, (rows, length), generator=generator)

    facts = {"width": 50, "per_position": False, "max_length": 24, "tied": True}
    return ModelSpec.of(make, inputs="tokens", forward=predict, make_batch=batch, **facts)


def observe(model: nn.Module) -> float:
    """Item part of the sum of embeddings, divided by the item embedding."""
    sums, ids = [], torch.tensor([[3, 7, 1, 4]])
    model.LayerNorm.register_forward_pre_hook(lambda _, args: sums.append(args[0]))
    model(ids, torch.tensor([4]))
    return ((sums[0] - model.position_embedding.weight[:4]) / model.item_embedding(ids)).mean().item()

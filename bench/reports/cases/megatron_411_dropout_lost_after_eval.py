"""Megatron-LM#411 (NVIDIA/Megatron-LM): after one call in eval mode, attention has no dropout in training.

FlashSelfAttention sets its own dropout rate to 0 in eval mode, and never restores it.
https://github.com/NVIDIA/Megatron-LM/pull/411
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


class FlashSelfAttention(nn.Module):
    """Attention without a matrix of weights. Queries, keys and values are (B, S, H, D)."""

    def __init__(self, causal: bool, attention_dropout: float, *, keep_rate: bool) -> None:
        super().__init__()
        self.causal, self.dropout_p, self.keep_rate = causal, attention_dropout, keep_rate

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        is_causal = self.causal if self.training else q.shape[1] == k.shape[1]
        dropout_p = self.dropout_p if self.training else 0.0
        if not (self.training or self.keep_rate):
            self.dropout_p = 0.0
        states = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(*states, dropout_p=dropout_p, is_causal=is_causal)
        return y.transpose(1, 2)


class ParallelTransformerLayer(nn.Module):
    """Attention and MLP of hidden states [s, b, h], each after its norm."""

    def __init__(self, args: SimpleNamespace, *, keep_rate: bool) -> None:
        super().__init__()
        width, self.num_heads = args.hidden_size, args.num_attention_heads
        self.input_norm, self.post_attention_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.dense = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.core_attention_flash = FlashSelfAttention(True, args.attention_dropout, keep_rate=keep_rate)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.hidden_dropout = nn.Dropout(args.hidden_dropout)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.query_key_value(self.input_norm(x)).unflatten(-1, (self.num_heads, -1))
        q, k, v = (states.transpose(0, 1) for states in mixed.chunk(3, dim=-1))
        x = x + self.hidden_dropout(self.dense(self.core_attention_flash(q, k, v).transpose(0, 1).flatten(2)))
        return x + self.hidden_dropout(self.mlp(self.post_attention_norm(x)))


class GPTModel(nn.Module):
    """Language model whose head is the word embedding."""

    def __init__(self, args: SimpleNamespace, *, keep_rate: bool) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(args.padded_vocab_size, args.hidden_size)
        self.position_embeddings = nn.Embedding(args.max_position_embeddings, args.hidden_size)
        self.embedding_dropout = nn.Dropout(args.hidden_dropout)
        layers = (ParallelTransformerLayer(args, keep_rate=keep_rate) for _ in range(args.num_layers))
        self.layers, self.final_norm = nn.ModuleList(layers), nn.LayerNorm(args.hidden_size)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.01 if "dense" in name or "mlp.2" in name else 0.02)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = self.position_embeddings.weight[: input_ids.shape[1]]
        x = self.embedding_dropout(self.word_embeddings(input_ids) + positions).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.final_norm(x).transpose(0, 1), self.word_embeddings.weight)


SIZES = {"padded_vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4}
ARGS = SimpleNamespace(**SIZES, max_position_embeddings=64, attention_dropout=0.1, hidden_dropout=0.1)


def buggy() -> nn.Module:
    """The rate is overwritten."""
    return GPTModel(ARGS, keep_rate=False)


def healthy() -> nn.Module:
    """The rate is kept."""
    return GPTModel(ARGS, keep_rate=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """A causal model with tied embeddings."""
    return ModelSpec.of(make, causal=True, tied=True, max_length=64)


@torch.no_grad()
def observe(model: nn.Module) -> float:
    """Largest difference of two calls of the attention in train mode, after a call in eval mode."""
    attention = model.layers[0].core_attention_flash
    q, k, v = torch.randn(3, 2, 10, 4, 8, generator=torch.Generator().manual_seed(1))
    attention.eval()(q, k, v)
    attention.train()
    return (attention(q, k, v) - attention(q, k, v)).abs().max().item()

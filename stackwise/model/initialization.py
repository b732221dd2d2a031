"""Initial weights: a first loss at ln(vocab), a residual stream that does not grow with depth."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from stackwise.model.block import Block

__all__ = ["embedding_std", "head_std", "initialize_block", "initialize_embedding", "initialize_head"]

WEIGHT_STD = 0.02
FLOOR_STD = 2e-3  # below, the epsilon of the first norm is no longer small beside the mean square
_EXCESS = 0.03  # nats above ln(vocab) that either bound below may cost


def embedding_std(vocab_size: int, d_model: int, *, tied: bool) -> float:
    """Standard deviation of the token embedding.

    A tied head multiplies the final hidden state, which still carries the token's own embedding,
    with that embedding again. In the worst case, where nothing else is in the stream, that logit is
    std * d_model, and softmax over V otherwise flat logits costs ln(1 + (e^logit - 1) / V) nats.
    The bound keeps this below 0.03 nat; N(0, 1) embeddings give a first loss in the hundreds. Where
    the bound is below `FLOOR_STD`, the model is so wide that its blocks drown the embedding anyway.
    """
    if not tied:
        return WEIGHT_STD
    bound = min(math.log1p(_EXCESS * vocab_size) / d_model, head_std(d_model))
    return min(WEIGHT_STD, max(FLOOR_STD, bound))


def head_std(d_model: int) -> float:
    """Standard deviation of the head: logits of variance s cost s / 2 nats, kept below 0.03."""
    return min(WEIGHT_STD, math.sqrt(2 * _EXCESS / d_model))


def initialize_block(block: Block, n_blocks: int) -> None:
    """N(0, 0.02), and the two projections into the residual stream divided by sqrt(2 * n_blocks).

    Source: Radford et al. 2019 (GPT-2), section 2.3. `n_blocks` is the depth of the whole model.
    """
    into_residual = {block.attention.out, block.feedforward.down}
    for module in block.modules():
        if isinstance(module, nn.Linear):
            std = WEIGHT_STD / math.sqrt(2 * n_blocks) if module in into_residual else WEIGHT_STD
            _normal(module.weight, std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def initialize_embedding(embedding: nn.Embedding, *, tied: bool) -> None:
    """N(0, `embedding_std`)."""
    _normal(embedding.weight, embedding_std(embedding.num_embeddings, embedding.embedding_dim, tied=tied))


def initialize_head(head: nn.Linear) -> None:
    """N(0, `head_std`)."""
    _normal(head.weight, head_std(head.in_features))


@torch.no_grad()
def _normal(weight: Tensor, std: float) -> None:
    nn.init.normal_(weight, mean=0.0, std=std)

"""BERT-pytorch#49 (codertimo/BERT-pytorch): the loss of next sentences ignores all pairs that are not next.

One `NLLLoss(ignore_index=0)` serves both tasks. In the masked language model, 0 means no target. For the next
sentence, 0 is the class "not next", which then never counts. The classifier learns to answer "next".
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB_SIZE, MASK_INDEX, FIRST_WORD, FIRST_SENTENCE, MAX_LENGTH = 50, 4, 5, 4, 64


class BERTEmbedding(nn.Module):
    """Embeddings of token and segment, and sines and cosines of the position."""

    def __init__(self, embed_size: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB_SIZE, embed_size, padding_idx=0)
        self.segment = nn.Embedding(3, embed_size, padding_idx=0)
        angles = torch.arange(MAX_LENGTH)[:, None] * torch.exp(
            torch.arange(0, embed_size, 2) * (-math.log(10000.0) / embed_size)
        )
        self.register_buffer("position", torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1))

    def forward(self, sequence: Tensor, segment_label: Tensor) -> Tensor:
        """Return (batch, time, embed_size)."""
        position = self.position[: sequence.shape[1]].to(self.token.weight.dtype)
        return self.token(sequence) + position + self.segment(segment_label)


class TransformerBlock(nn.Module):
    """Attention and feed-forward network, with a norm before each."""

    def __init__(self, hidden: int, attn_heads: int) -> None:
        super().__init__()
        self.attn_heads = attn_heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value, self.output_linear = (nn.Linear(hidden, hidden) for _ in range(4))
        self.feed_forward = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Apply the block to (batch, time, hidden)."""
        h = self.norm1(x)
        q, k, v = (
            p(h).unflatten(-1, (self.attn_heads, -1)).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.output_linear(y.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class BERTLM(nn.Module):
    """BERT with both tasks of its pre-training, and their loss."""

    def __init__(self, *, own_criterion: bool, hidden: int = 32, attn_heads: int = 4) -> None:
        super().__init__()
        self.embedding = BERTEmbedding(hidden)
        self.transformer_blocks = nn.ModuleList(TransformerBlock(hidden, attn_heads) for _ in range(2))
        self.norm = nn.LayerNorm(hidden)
        self.next_sentence, self.mask_lm = nn.Linear(hidden, 2), nn.Linear(hidden, VOCAB_SIZE)
        self.criterion = nn.NLLLoss(ignore_index=0)
        self.next_criterion = nn.NLLLoss() if own_criterion else self.criterion

    def forward(self, x: Tensor, segment_label: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of "is next" (batch, 2) and of ids (batch, time, vocabulary)."""
        mask = (x > 0)[:, None, None]
        x = self.embedding(x, segment_label)
        for transformer in self.transformer_blocks:
            x = transformer(x, mask)
        x = self.norm(x)
        return self.next_sentence(x[:, 0]).log_softmax(dim=-1), self.mask_lm(x).log_softmax(dim=-1)

    def loss(self, bert_input: Tensor, segment_label: Tensor, bert_label: Tensor, is_next: Tensor) -> Tensor:
        """Return the sum of both losses. `bert_label` is 0 where the id is not masked."""
        next_sent_output, mask_lm_output = self(bert_input, segment_label)
        next_loss = self.next_criterion(next_sent_output, is_next)
        return next_loss + self.criterion(mask_lm_output.transpose(1, 2), bert_label)


def buggy() -> nn.Module:
    """One criterion for both tasks."""
    return BERTLM(own_criterion=False)


def healthy() -> nn.Module:
    """A criterion without an ignored class for the next sentence."""
    return BERTLM(own_criterion=True)


def _segments(ids: Tensor) -> Tensor:
    """Segment 1 for the first sentence, 2 for the second one, and 0 for padding."""
    return (1 + (torch.arange(ids.shape[1], device=ids.device) >= FIRST_SENTENCE)) * (ids > 0)


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids, _segments(ids))[1]


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Loss of rows of which every second one is a pair that is not next. Every third id is masked."""
    masked = torch.arange(ids.shape[1], device=ids.device) % 3 == 1
    is_next = 1 - torch.arange(len(ids), device=ids.device) % 2
    return model.loss(ids.masked_fill(masked, MASK_INDEX), _segments(ids), ids * masked, is_next)


def _make_batch(batch_size: int, seq_len: int, generator: torch.Generator) -> Tensor:
    return torch.randint(FIRST_WORD, VOCAB_SIZE, (batch_size, seq_len), generator=generator)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a bidirectional model, padded with 0, and the loss of both tasks."""
    return ModelSpec.of(
        make,
        inputs="tokens",
        width=VOCAB_SIZE,
        causal=False,
        max_length=MAX_LENGTH,
        forward=_forward,
        loss=_loss,
        make_batch=_make_batch,
        padding_sides=("right",),
        masked=lambda model, ids, keep: _forward(model, ids * keep),
    )


def observe(model: nn.Module) -> Tensor:
    """Return 1 if the answer to a pair that is not next has no effect on the loss of two pairs."""
    answers = torch.zeros(2, 2, requires_grad=True)
    loss = model.next_criterion(answers.log_softmax(dim=-1), torch.tensor([1, 0]))
    (grad,) = torch.autograd.grad(loss, answers)
    return (~grad[1].any()).float()

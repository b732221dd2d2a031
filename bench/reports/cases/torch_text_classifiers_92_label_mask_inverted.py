"""torchTextClassifiers#92 (InseeFrLab/torchTextClassifiers): label attention reads the padding only.

`scaled_dot_product_attention` expects True at keys that take part. The mask passed to it is True at padding,
so each label is built from padding, and the tokens of the text have no weight.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


def apply_rotary_emb(x: torch.Tensor) -> torch.Tensor:
    """Rotate (batch, heads, time, head_dim)."""
    half = x.shape[-1] // 2
    freqs = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[2], device=x.device, dtype=x.dtype)[:, None] * freqs
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class Block(nn.Module):
    """Bidirectional attention and feed-forward network."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(n_embd, n_embd, bias=False) for _ in range(4))
        self.c_fc, self.mlp_proj = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)
        self.norm_1, self.norm_2 = nn.RMSNorm(n_embd), nn.RMSNorm(n_embd)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`mask` is True at tokens, (batch, 1, 1, time)."""
        y = self.norm_1(x)
        q, k, v = (
            c(y).unflatten(-1, (self.n_head, -1)).transpose(1, 2) for c in (self.c_q, self.c_k, self.c_v)
        )
        y = F.scaled_dot_product_attention(apply_rotary_emb(q), apply_rotary_emb(k), v, attn_mask=mask)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.norm_2(x))))


class LabelAttentionClassifier(nn.Module):
    """Cross-attention from an embedding of each class to the tokens."""

    def __init__(self, embedding_dim: int, num_classes: int, n_head: int, *, inverts: bool) -> None:
        super().__init__()
        self.n_head, self.inverts = n_head, inverts
        self.label_embeds = nn.Embedding(num_classes, embedding_dim)
        self.norm_1, self.norm_2 = nn.RMSNorm(embedding_dim), nn.RMSNorm(embedding_dim)
        self.c_q, self.c_k, self.c_v, self.c_proj = (
            nn.Linear(embedding_dim, embedding_dim, bias=False) for _ in range(4)
        )

    def forward(self, token_embeddings: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return an embedding of each class, (batch, classes, embedding_dim)."""
        labels = self.norm_1(self.label_embeds.weight).expand(len(token_embeddings), -1, -1)
        tokens = self.norm_2(token_embeddings)
        q, k, v = (
            c(y).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for c, y in ((self.c_q, labels), (self.c_k, tokens), (self.c_v, tokens))
        )
        mask = (attention_mask == 0) if self.inverts else (attention_mask != 0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        return self.c_proj(y.transpose(1, 2).flatten(2))


class TextClassificationModel(nn.Module):
    """Encoder with label attention; the head gives a logit for each class."""

    def __init__(
        self, *, inverts: bool, vocab_size: int = 80, n_embd: int = 32, num_classes: int = 5
    ) -> None:
        super().__init__()
        self.embedding_layer = nn.Embedding(vocab_size, n_embd, padding_idx=0)
        self.blocks = nn.ModuleList(Block(n_embd, 4) for _ in range(2))
        self.label_attention = LabelAttentionClassifier(n_embd, num_classes, 4, inverts=inverts)
        self.classification_head = nn.Linear(n_embd, 1)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits (batch, classes); without a mask, all ids are tokens."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        x = self.embedding_layer(input_ids)
        for block in self.blocks:
            x = block(x, attention_mask.bool()[:, None, None])
        return self.classification_head(self.label_attention(x, attention_mask)).squeeze(-1)


def buggy() -> nn.Module:
    """True at padding."""
    return TextClassificationModel(inverts=True)


def healthy() -> nn.Module:
    """True at tokens."""
    return TextClassificationModel(inverts=False)


def _make_batch(batch_size: int, seq_len: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(1, 80, (batch_size, seq_len), generator=generator)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a classifier whose padding is masked."""
    return ModelSpec.of(
        make,
        make_batch=_make_batch,
        per_position=False,
        causal=False,
        masked=lambda model, ids, keep: model(ids, keep.long()),
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the change of the logits by another vector of a padded position in label attention."""
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0]])
    before = model.label_attention(x, mask)
    x[:, 6] = 3 * x[:, 6].flip(-1)
    return model.label_attention(x, mask) - before

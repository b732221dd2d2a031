"""unsloth-zoo#963 (unslothai/unsloth-zoo): the padding mask of a batch replaces the causal mask in training.

The language model takes a given mask as the whole mask, and makes a causal one only without a mask. The
training loss passes the padding mask, so each token sees the token that it has to predict.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec, RotaryClaim


class Attention(nn.Module):
    """Attention with rotary positions and fewer keys than queries."""

    def __init__(self, dims: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dims // n_heads
        self.q_proj = nn.Linear(dims, dims, bias=False)
        self.k_proj = nn.Linear(dims, n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dims, n_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(dims, dims, bias=False)

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate (batch, heads, time, head_dim)."""
        freqs = 10000.0 ** (
            -torch.arange(0, self.head_dim, 2, device=x.device, dtype=x.dtype) / self.head_dim
        )
        angles = torch.arange(x.shape[2], device=x.device, dtype=x.dtype)[:, None] * freqs
        a, b = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`mask` is True for visible keys."""
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(self.rope(q), self.rope(k), v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Pre-norm layer with a gated MLP."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.self_attn = Attention(dims, 4, 2)
        self.gate_proj, self.up_proj = (nn.Linear(dims, 2 * dims, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * dims, dims, bias=False)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dims), nn.RMSNorm(dims)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (batch, time, dims)."""
        h = x + self.self_attn(self.input_layernorm(x), mask)
        y = self.post_attention_layernorm(h)
        return h + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class LanguageModel(nn.Module):
    """Language model; a mask replaces the one that it makes itself."""

    def __init__(self, vocab_size: int, dims: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, dims)
        self.layers = nn.ModuleList(TransformerBlock(dims) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(dims), nn.Linear(dims, vocab_size, bias=False)

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits."""
        if mask is None:
            length = inputs.shape[1]
            mask = torch.ones(length, length, dtype=torch.bool, device=inputs.device).tril()
        h = self.embed_tokens(inputs)
        for layer in self.layers:
            h = layer(h, mask)
        return self.lm_head(self.norm(h))


class Model(nn.Module):
    """Model in training, called with the batch of a collator."""

    def __init__(self, *, keep_causality: bool, vocab_size: int = 80, dims: int = 32) -> None:
        super().__init__()
        self.keep_causality = keep_causality
        self.language_model = LanguageModel(vocab_size, dims)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> SimpleNamespace:
        """Return logits, and the loss of the next tokens if there are labels."""
        mask, loss = None, None
        if attention_mask is not None:
            mask = attention_mask.bool()[:, None, None, :]
            if self.keep_causality:
                causal = torch.ones(input_ids.shape[1:] * 2, dtype=torch.bool, device=mask.device).tril()
                own = torch.eye(len(causal), dtype=torch.bool, device=mask.device)
                mask = mask & causal | own  # padding reads itself, so that no row is empty
        logits = self.language_model(input_ids, mask=mask)
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def buggy() -> nn.Module:
    """The padding mask is the whole mask."""
    return Model(keep_causality=False)


def healthy() -> nn.Module:
    """The padding mask is added to the causal one."""
    return Model(keep_causality=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model with right padding and its own loss."""

    def masked(model: nn.Module, ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return model(ids, attention_mask=keep.long()).logits

    return ModelSpec.of(
        make,
        causal=True,
        masked=masked,
        labelled_loss=lambda model, ids, labels: model(ids, torch.ones_like(ids), labels).loss,
        rotary=RotaryClaim(theta=10000.0, layout="halves"),
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the change of earlier logits by another last token, in a batch with a mask."""
    ids = torch.randint(0, 80, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 9, [1] * 7 + [0] * 2])
    other = ids.clone()
    other[:, 6] = (other[:, 6] + 5) % 80
    return (model(other, mask).logits - model(ids, mask).logits)[:, :6]

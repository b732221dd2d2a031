"""transformers#35855 (huggingface/transformers): in training PaliGemma attends to padding.

The mask hides padding first and then opens every prefix token (token_type_id 0), which padding also is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


@dataclass
class PaliGemmaOutput:
    """Loss (with labels) and logits."""

    loss: torch.Tensor | None
    logits: torch.Tensor


class GemmaLayer(nn.Module):
    """Attention with rotary positions and an additive mask, then a gated MLP."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up, self.down = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """One decoder layer."""
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        q, k = (
            torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1))
        )
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.gelu(self.gate(h)) * self.up(h))


class PaliGemma(nn.Module):
    """Prefix language model: the prefix is bidirectional, the suffix causal. Image tokens are left out."""

    def __init__(self, pad_last: bool, vocab: int = 64, hidden: int = 32) -> None:
        super().__init__()
        self.pad_last = pad_last
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(GemmaLayer(hidden, 4) for _ in range(2))
        self.norm = nn.RMSNorm(hidden)

    def update_causal_mask(
        self, attention_mask: torch.Tensor, token_type_ids: torch.Tensor, training: bool, dtype: torch.dtype
    ) -> torch.Tensor:
        """Additive mask (batch, 1, queries, keys)."""
        length, lowest = attention_mask.shape[1], torch.finfo(dtype).min
        mask = torch.full((length, length), lowest if training else 0.0, dtype=dtype).triu(1)
        mask = mask.expand(attention_mask.shape[0], 1, -1, -1)
        padding, prefix = attention_mask[:, None, None, :] == 0, token_type_ids[:, None, None, :] == 0
        if self.pad_last:
            return mask.masked_fill(prefix, 0.0).masked_fill(padding, lowest)
        return mask.masked_fill(padding, lowest).masked_fill(prefix & training, 0.0)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> PaliGemmaOutput:
        """Train with labels and token_type_ids (0 prefix, 1 suffix); without labels all is prefix."""
        if labels is not None and token_type_ids is None:
            raise ValueError("token_type_ids are required with labels")
        attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = self.embed(input_ids) * self.embed.embedding_dim**0.5
        mask = self.update_causal_mask(attention_mask, types, labels is not None, x.dtype)
        inv_freq = 10000.0 ** (-torch.arange(0, 8, 2).to(x.dtype) / 8)
        angle = torch.arange(input_ids.shape[1])[:, None] * inv_freq
        for layer in self.layers:
            x = layer(x, mask, angle.cos(), angle.sin())
        logits, loss = F.linear(self.norm(x), self.embed.weight), None
        if labels is not None:
            targets = labels.masked_fill(attention_mask == 0, -100)[:, 1:]
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
        return PaliGemmaOutput(loss, logits)


def buggy() -> nn.Module:
    """Padding opened again."""
    return PaliGemma(pad_last=False)


def healthy() -> nn.Module:
    """Padding hidden last."""
    return PaliGemma(pad_last=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """A training call, in which tokens below 32 are the prefix."""

    def train(
        model: nn.Module, ids: torch.Tensor, labels: torch.Tensor, **mask: torch.Tensor
    ) -> PaliGemmaOutput:
        return model(ids, token_type_ids=(ids < 32).long(), labels=labels, **mask)

    return ModelSpec.of(
        make,
        causal=False,
        padding_sides=("left", "right"),
        forward=lambda model, ids: train(model, ids, ids).logits,
        masked=lambda model, ids, keep: train(model, ids, ids, attention_mask=keep.long()).logits,
    )


def observe(model: nn.Module) -> torch.Tensor:
    """Training loss of a left-padded row minus that of the row without padding; 0 is right."""
    model, ids = model.double().eval(), torch.tensor([[5, 9, 11, 2, 31, 44, 17]])
    types = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    mask, labels = torch.ones_like(ids), ids.masked_fill(types == 0, -100)
    left = [F.pad(t, (3, 0), value=v) for t, v in ((ids, 0), (mask, 0), (types, 0), (labels, -100))]
    with torch.no_grad():
        return model(*left).loss - model(ids, mask, types, labels).loss

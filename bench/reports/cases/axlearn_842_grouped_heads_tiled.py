"""axlearn#842 (apple/axlearn): grouped-query attention pairs query heads with the wrong key/value heads.

Since #837 query head h reads key/value head h % kv_heads (tiled), not h // group (repeated) as before.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import Facts, ModelSpec

DECLARATION = "query head h attends with key/value head h // (num_heads // num_kv_heads)"


class GroupedQueryAttention(nn.Module):
    """Causal attention in which several query heads share a key/value head, without repeating it."""

    def __init__(self, input_dim: int, num_heads: int, num_kv_heads: int, tiled: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.tiled = num_heads, num_kv_heads, tiled
        self.per_head_dim = input_dim // num_heads
        self.i_proj = nn.Linear(input_dim, (num_heads + 2 * num_kv_heads) * self.per_head_dim, bias=False)
        self.o_proj = nn.Linear(input_dim, input_dim, bias=False)

    def split_heads(self, q_proj: torch.Tensor) -> torch.Tensor:
        """[b, t, heads, h] to [b, t, kv heads, group, h]."""
        group = self.num_heads // self.num_kv_heads
        if self.tiled:
            return q_proj.unflatten(2, (group, self.num_kv_heads)).transpose(2, 3)
        return q_proj.unflatten(2, (self.num_kv_heads, group))

    def merge_heads(self, context: torch.Tensor) -> torch.Tensor:
        """[b, t, kv heads, group, h] back to [b, t, heads * h]."""
        if self.tiled:
            context = context.transpose(2, 3)
        return context.flatten(2)

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        """Self-attention."""
        sizes = [n * self.per_head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q_proj, k_proj, v_proj = (
            part.unflatten(-1, (-1, self.per_head_dim)) for part in self.i_proj(query).split(sizes, dim=-1)
        )
        q_proj = self.split_heads(q_proj) / math.sqrt(self.per_head_dim)
        logits = torch.einsum("btkgh,bskh->bkgts", q_proj, k_proj)
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        probs = logits.masked_fill(future, float("-inf")).softmax(dim=-1)
        return self.o_proj(self.merge_heads(torch.einsum("bkgts,bskh->btkgh", probs, v_proj)))


class TransformerLayer(nn.Module):
    """Pre-norm layer."""

    def __init__(self, input_dim: int, tiled: bool) -> None:
        super().__init__()
        self.self_attention = GroupedQueryAttention(input_dim, num_heads=4, num_kv_heads=2, tiled=tiled)
        self.feed_forward = nn.Sequential(
            nn.RMSNorm(input_dim), nn.Linear(input_dim, 64), nn.SiLU(), nn.Linear(64, input_dim)
        )
        self.norm = nn.RMSNorm(input_dim)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Attention, then feed-forward."""
        data = data + self.self_attention(self.norm(data))
        return data + self.feed_forward(data)


class CausalLM(nn.Module):
    """Embedding, learned positions, layers, tied head."""

    def __init__(self, tiled: bool, vocab_size: int = 48, dim: int = 32) -> None:
        super().__init__()
        self.token_emb, self.pos_emb = nn.Embedding(vocab_size, dim), nn.Embedding(32, dim)
        self.layers = nn.Sequential(TransformerLayer(dim, tiled), TransformerLayer(dim, tiled))
        self.output_norm = nn.RMSNorm(dim)

    def forward(self, input_ids: torch.Tensor, target_labels: torch.Tensor | None = None) -> dict:
        """Return logits and, with target_labels (already shifted), the loss."""
        x = self.token_emb(input_ids) + self.pos_emb(torch.arange(input_ids.shape[1]))
        logits = F.linear(self.output_norm(self.layers(x)), self.token_emb.weight)
        loss = (
            None if target_labels is None else F.cross_entropy(logits.flatten(0, 1), target_labels.flatten())
        )
        return {"logits": logits, "loss": loss}


def buggy() -> nn.Module:
    """Heads tiled."""
    return CausalLM(tiled=True)


def healthy() -> nn.Module:
    """Heads repeated."""
    return CausalLM(tiled=False)


def buggy_declared() -> ModelSpec:
    """State two key heads, each of two consecutive query heads."""
    return ModelSpec.of(buggy, causal=True, max_length=32, facts=Facts(key_heads=2))


def healthy_declared() -> ModelSpec:
    """State two key heads, each of two consecutive query heads."""
    return ModelSpec.of(healthy, causal=True, max_length=32, facts=Facts(key_heads=2))


def observe(model: nn.Module) -> torch.Tensor:
    """An attention's output minus that of PyTorch's own grouped-query attention; 0 is right."""
    attention = model.double().eval().layers[0].self_attention
    seen: list[torch.Tensor] = []
    handle = attention.register_forward_hook(lambda _m, args, out: seen.extend((args[0], out)))
    with torch.no_grad():
        model(torch.arange(10)[None])
        handle.remove()
        q, k, v = attention.i_proj(seen[0]).unflatten(-1, (8, 8)).transpose(1, 2).split([4, 2, 2], dim=1)
        right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return seen[1] - attention.o_proj(right.transpose(1, 2).flatten(2))

"""flash-linear-attention#594 (fla-org): the normaliser of linear attention sums over heads, not over time.

The tensors are (batch, time, heads, width), and `k.cumsum(-2)` adds up the keys of the heads of one token.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


def normalize_output(q: torch.Tensor, k: torch.Tensor, o: torch.Tensor, dim: int) -> torch.Tensor:
    """Divide by the sum of the weights."""
    z = (q * k.cumsum(dim)).sum(-1, keepdim=True)
    return o / (z + 1e-10)


def linear_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, norm_dim: int) -> torch.Tensor:
    """Causal linear attention of (batch, time, heads, width)."""
    q = q * q.shape[-1] ** -0.5
    weights = torch.einsum("bthk,bshk->bhts", q, k).tril()
    return normalize_output(q, k, torch.einsum("bhts,bshv->bthv", weights, v), norm_dim)


class LinearAttention(nn.Module):
    """Linear attention with the feature map elu + 1."""

    def __init__(self, hidden_size: int, num_heads: int, norm_dim: int) -> None:
        super().__init__()
        self.num_heads, self.norm_dim = num_heads, norm_dim
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(hidden_size, hidden_size, bias=False) for _ in range(4)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` is (batch, time, hidden_size)."""
        q, k, v = (
            proj(hidden_states).unflatten(-1, (self.num_heads, -1))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(linear_attn(F.elu(q) + 1, F.elu(k) + 1, v, self.norm_dim).flatten(2))


class LinearAttentionBlock(nn.Module):
    """Attention and gated MLP."""

    def __init__(self, hidden_size: int, num_heads: int, norm_dim: int) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(hidden_size), nn.RMSNorm(hidden_size)
        self.attn = LinearAttention(hidden_size, num_heads, norm_dim)
        self.gate_proj = nn.Linear(hidden_size, 4 * hidden_size, bias=False)
        self.down_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` is (batch, time, hidden_size)."""
        hidden_states = hidden_states + self.attn(self.attn_norm(hidden_states))
        gate, y = self.gate_proj(self.mlp_norm(hidden_states)).chunk(2, dim=-1)
        return hidden_states + self.down_proj(F.silu(gate) * y)


class LinearAttentionForCausalLM(nn.Module):
    """Language model without positional encoding."""

    def __init__(self, *, norm_dim: int, vocab_size: int = 70, hidden_size: int = 32) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(LinearAttentionBlock(hidden_size, 4, norm_dim) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def buggy() -> nn.Module:
    """Cumulative sum along the heads."""
    return LinearAttentionForCausalLM(norm_dim=-2)


def healthy() -> nn.Module:
    """Cumulative sum along time."""
    return LinearAttentionForCausalLM(norm_dim=1)


def buggy_declared() -> ModelSpec:
    """The model is causal."""
    return ModelSpec.of(buggy, causal=True)


def healthy_declared() -> ModelSpec:
    """The model is causal."""
    return ModelSpec.of(healthy, causal=True)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Attention over equal values minus that value; 0 is right, as weights of a mean sum to 1."""
    attn = copy.deepcopy(model.layers[0].attn).double()
    generator = torch.Generator().manual_seed(1)
    q, k = torch.rand(2, 2, 7, 4, 8, dtype=torch.float64, generator=generator).unbind()
    return linear_attn(q, k, torch.ones_like(k), attn.norm_dim) - 1

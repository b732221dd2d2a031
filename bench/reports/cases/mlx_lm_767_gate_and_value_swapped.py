"""mlx-lm#767 (ml-explore/mlx-lm): the experts of mixture models apply SiLU to the value, not to the gate.

`swiglu(gate, x)` got its arguments in a new order, and the wrapper `SwiGLU` of the expert layers was not
changed with it. It computes `silu(x) * gate` where `silu(gate) * x` is meant.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import Facts, ModelSpec

VOCAB, DIM, HEAD_DIM, KV_HEADS, EXPERTS, TOP_K = 64, 32, 8, 2, 4, 2


def swiglu(gate: Tensor, x: Tensor) -> Tensor:
    """Return the gated value."""
    return F.silu(gate) * x


class SwiGLU(nn.Module):
    """Activation of expert layers."""

    def __init__(self, *, new_order: bool) -> None:
        super().__init__()
        self.new_order = new_order

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the gated value."""
        return swiglu(gate, x) if self.new_order else swiglu(x, gate)


class SwitchGLU(nn.Module):
    """Gated feed-forward networks, one for each expert."""

    def __init__(self, dim: int, hidden: int, *, new_order: bool) -> None:
        super().__init__()
        bound = dim**-0.5
        self.gate_proj, self.up_proj = (
            nn.Parameter(torch.empty(EXPERTS, hidden, dim).uniform_(-bound, bound)) for _ in range(2)
        )
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, dim, hidden).uniform_(-bound, bound))
        self.activation = SwiGLU(new_order=new_order)

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        """`x` is (tokens, dim), `indices` (tokens, k); the result is (tokens, k, dim)."""
        x_up = torch.einsum("td,tkhd->tkh", x, self.up_proj[indices])
        x_gate = torch.einsum("td,tkhd->tkh", x, self.gate_proj[indices])
        return torch.einsum("tkh,tkdh->tkd", self.activation(x_up, x_gate), self.down_proj[indices])


class SparseMoeBlock(nn.Module):
    """Experts and their router."""

    def __init__(self, dim: int, hidden: int, *, new_order: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, EXPERTS, bias=False)
        self.switch_mlp = SwitchGLU(dim, hidden, new_order=new_order)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, time, dim)."""
        flat = x.flatten(0, 1)
        scores, indices = self.gate(flat).softmax(dim=-1).topk(TOP_K, dim=-1)
        scores = scores / scores.sum(dim=-1, keepdim=True)
        return (self.switch_mlp(flat, indices) * scores[..., None]).sum(dim=1).view_as(x)


class Attention(nn.Module):
    """Grouped-query attention with norms of queries and keys."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(dim, KV_HEADS * HEAD_DIM, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = (nn.RMSNorm(HEAD_DIM, eps=1e-6) for _ in range(2))

    def rope(self, x: Tensor) -> Tensor:
        """Rotate halves of (batch, time, heads, HEAD_DIM)."""
        freqs = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
        angles = (torch.arange(x.shape[1], device=x.device)[:, None] * freqs)[:, None].to(x)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, time, dim)."""
        q, k, v = (f(x).unflatten(-1, (-1, HEAD_DIM)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.transpose(1, 2) for y in (self.rope(self.q_norm(q)), self.rope(self.k_norm(k)), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Qwen3MoeModel(nn.Module):
    """Language model with experts."""

    def __init__(self, *, new_order: bool) -> None:
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(VOCAB, DIM), nn.RMSNorm(DIM, eps=1e-6)
        self.norms = nn.ModuleList(nn.RMSNorm(DIM, eps=1e-6) for _ in range(4))
        self.attentions = nn.ModuleList(Attention(DIM) for _ in range(2))
        self.mlps = nn.ModuleList(SparseMoeBlock(DIM, 24, new_order=new_order) for _ in range(2))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        h = self.embed_tokens(inputs)
        for i in range(2):
            h = h + self.attentions[i](self.norms[2 * i](h))
            h = h + self.mlps[i](self.norms[2 * i + 1](h))
        return self.lm_head(self.norm(h))


def buggy() -> nn.Module:
    """Pass the value first."""
    return Qwen3MoeModel(new_order=False)


def healthy() -> nn.Module:
    """Pass the gate first."""
    return Qwen3MoeModel(new_order=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State heads, norms and experts, as in the configuration."""
    facts = Facts(key_heads=KV_HEADS, norm_eps=1e-6, experts_per_token=TOP_K, routing_sum=1.0)
    return ModelSpec.of(make, causal=True, tied=False, facts=facts)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the output of expert 0 minus that of a gated network with its weights."""
    x, layer = torch.randn(5, DIM, generator=torch.Generator().manual_seed(1)), model.mlps[0].switch_mlp
    wanted = (F.silu(x @ layer.gate_proj[0].T) * (x @ layer.up_proj[0].T)) @ layer.down_proj[0].T
    return layer(x, torch.zeros(5, 1, dtype=torch.long))[:, 0] - wanted

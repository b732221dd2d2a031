"""flash-linear-attention#875 (fla-org): the normaliser of linear attention passes no gradient to the keys.

The running sum of the keys comes from a kernel that is called outside of an autograd function, so its result
has no history. Outputs are right, and the gradient of the keys lacks its part through the denominator.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

VOCAB = 60
State = tuple[Tensor, Tensor]


def chunk_global_cumsum(k: Tensor) -> Tensor:
    """Return the running sum over time, as the kernel does: without a backward pass."""
    with torch.no_grad():
        return k.cumsum(dim=1)


def naive_cumsum(k: Tensor) -> Tensor:
    """Return the running sum over time."""
    return k.cumsum(dim=1)


class LinearAttention(nn.Module):
    """Causal linear attention (arXiv:2006.16236) with the feature map elu + 1."""

    def __init__(self, dim: int, heads: int, cumsum: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.cumsum, self.scale = heads, cumsum, (dim // heads) ** -0.5
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return outputs and state. All are (batch, time, heads, head_dim)."""
        causal = torch.ones(q.shape[1], k.shape[1], dtype=q.dtype, device=q.device).tril()
        scores = torch.einsum("bthd,bshd->bhts", q * self.scale, k) * causal
        o = torch.einsum("bhts,bshe->bthe", scores, v)
        k_cum, kv = self.cumsum(k), torch.einsum("bshd,bshe->bhde", k, v)
        if state is not None:
            o = o + torch.einsum("bthd,bhde->bthe", q * self.scale, state[0])
            k_cum, kv = k_cum + state[1], kv + state[0]
        o = o / ((q * self.scale * k_cum).sum(dim=-1, keepdim=True) + 1e-10)
        return o, (kv, k_cum[:, -1:])

    def forward(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """`x` is (batch, time, dim)."""
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.q_proj, self.k_proj, self.v_proj))
        o, state = self.attend(F.elu(q) + 1, F.elu(k) + 1, v, state)
        return self.o_proj(o.flatten(2)), state


class LinearAttentionForCausalLM(nn.Module):
    """Language model with linear attention."""

    def __init__(self, *, cumsum: Callable[[Tensor], Tensor], dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, dim)
        self.attn_norm, self.mlp_norm = (nn.ModuleList(nn.RMSNorm(dim) for _ in range(2)) for _ in range(2))
        self.attn = nn.ModuleList(LinearAttention(dim, heads, cumsum) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)) for _ in range(2)
        )
        self.norm, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, past: list[State] | None = None) -> tuple[Tensor, list[State]]:
        """Return logits of the new tokens, and the states after them."""
        x, states = self.embeddings(input_ids), []
        for i, attn in enumerate(self.attn):
            y, state = attn(self.attn_norm[i](x), past[i] if past else None)
            x = x + y
            x = x + self.mlp[i](self.mlp_norm[i](x))
            states.append(state)
        return self.lm_head(self.norm(x)), states


def buggy() -> nn.Module:
    """Sum the keys without a backward pass."""
    return LinearAttentionForCausalLM(cumsum=chunk_global_cumsum)


def healthy() -> nn.Module:
    """Sum the keys with a backward pass."""
    return LinearAttentionForCausalLM(cumsum=naive_cumsum)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model that decodes with its states."""
    return ModelSpec.of(make, causal=True, decode=lambda model, tokens, cache: model(tokens, cache))


def observe(model: nn.Module) -> Tensor:
    """Return the gradient of keys minus that of attention with explicit weights."""
    q, k, v = torch.randn(3, 1, 6, 4, 8, generator=torch.Generator().manual_seed(1)).exp().unbind(0)
    keys = k.clone().requires_grad_()
    model.attn[0].attend(q, keys, v, None)[0].square().sum().backward()
    again = k.clone().requires_grad_()
    scores = torch.einsum("bthd,bshd->bhts", q, again).tril()
    weights = scores / scores.sum(dim=-1, keepdim=True)
    torch.einsum("bhts,bshe->bthe", weights, v).square().sum().backward()
    difference = (keys.grad - again.grad) / again.grad.abs().max()
    return torch.where(difference.abs() < 1e-5, 0.0, difference)

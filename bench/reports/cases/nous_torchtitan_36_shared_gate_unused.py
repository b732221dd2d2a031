"""torchtitan#36 (NousResearch/torchtitan): the gate of the shared expert is built, but never applied.

A rewrite of the forward pass of the mixture of experts lost the sigmoid gate of Qwen3-Next models.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


class FeedForward(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden_dim, bias=False), nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an update of `x`."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    """Routed experts, and one shared expert with a gate."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, top_k: int, *, gated: bool) -> None:
        super().__init__()
        self.top_k, self.gated = top_k, gated
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(dim, hidden_dim) for _ in range(num_experts))
        self.shared_experts, self.shared_gate = FeedForward(dim, hidden_dim), nn.Linear(dim, 1, bias=False)

    def routed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the chosen experts; their weights sum to 1."""
        scores, chosen = self.router(x).softmax(dim=-1).topk(self.top_k, dim=-1)
        scores = scores / scores.sum(dim=-1, keepdim=True)
        weights = torch.zeros(*x.shape[:-1], len(self.experts), dtype=x.dtype, device=x.device)
        weights = weights.scatter(-1, chosen, scores)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (outputs * weights[..., None, :]).sum(dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is (batch, time, dim)."""
        out = self.shared_experts(x)
        if self.gated:
            out = out * self.shared_gate(x).sigmoid()
        return out + self.routed(x)


class TransformerBlock(nn.Module):
    """Causal attention and mixture of experts."""

    def __init__(self, dim: int, n_heads: int, *, gated: bool) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.moe = MoE(dim, 2 * dim, 4, 2, gated=gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is (batch, time, dim)."""
        qkv = self.wqkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.wo(y)
        return x + self.moe(self.ffn_norm(x))


class Transformer(nn.Module):
    """Language model with learned positions."""

    def __init__(self, *, gated: bool, vocab_size: int = 80, dim: int = 32, max_seq_len: int = 64) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.pos_embeddings = nn.Embedding(max_seq_len, dim)
        self.layers = nn.ModuleList(TransformerBlock(dim, 4, gated=gated) for _ in range(2))
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tok_embeddings(tokens) + self.pos_embeddings(positions)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def buggy() -> nn.Module:
    """The shared expert is added without its gate."""
    return Transformer(gated=False)


def healthy() -> nn.Module:
    """The shared expert is multiplied by the sigmoid of its gate."""
    return Transformer(gated=True)


def buggy_declared() -> ModelSpec:
    """The model is causal."""
    return ModelSpec.of(buggy, causal=True, max_length=64)


def healthy_declared() -> ModelSpec:
    """The model is causal."""
    return ModelSpec.of(healthy, causal=True, max_length=64)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Output of a mixture minus that with the gate, written out."""
    moe = model.layers[0].moe.eval()
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))
    return moe(x) - moe.routed(x) - moe.shared_experts(x) * moe.shared_gate(x).sigmoid()

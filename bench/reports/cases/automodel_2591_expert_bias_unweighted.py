"""Automodel#2591 (NVIDIA-NeMo/Automodel): the down-projection bias of experts ignores the routing weight.

The routing weight is applied at the activation, before the down projection adds its bias. Each of the chosen
experts then adds its complete bias, so a token gets about top_k biases instead of one.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


class GroupedExperts(nn.Module):
    """Experts of gpt-oss, with biases; tokens are sorted by expert."""

    def __init__(self, n_experts: int, dim: int, inter_dim: int, *, weighted_bias: bool) -> None:
        super().__init__()
        self.weighted_bias = weighted_bias
        self.gate_up = nn.ModuleList(nn.Linear(dim, 2 * inter_dim) for _ in range(n_experts))
        self.down = nn.ModuleList(nn.Linear(inter_dim, dim) for _ in range(n_experts))

    def forward(self, x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return the sum over chosen experts; `weights` and `indices` are (tokens, top_k)."""
        y = torch.zeros_like(x)
        for i, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            token, slot = (indices == i).nonzero(as_tuple=True)
            permuted_probs = weights[token, slot, None]
            gate, up = gate_up(x[token]).chunk(2, dim=-1)
            out = down((up + 1) * gate * torch.sigmoid(1.702 * gate) * permuted_probs)
            if self.weighted_bias:
                out = out + (permuted_probs - 1) * down.bias
            y = y.index_add(0, token, out)
        return y


class MoE(nn.Module):
    """Router over the top experts, whose weights sum to 1."""

    def __init__(self, dim: int, n_experts: int, top_k: int, *, weighted_bias: bool) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(dim, n_experts)
        self.experts = GroupedExperts(n_experts, dim, dim, weighted_bias=weighted_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is (batch, time, dim)."""
        flat = x.flatten(0, 1)
        scores, indices = self.gate(flat).topk(self.top_k, dim=-1)
        return self.experts(flat, scores.softmax(dim=-1), indices).view_as(x)


class Block(nn.Module):
    """Causal attention and mixture of experts."""

    def __init__(self, dim: int, n_heads: int, *, weighted_bias: bool) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.o_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = MoE(dim, 4, 2, weighted_bias=weighted_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is (batch, time, dim)."""
        qkv = self.qkv(self.attn_norm(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o_proj(y)
        return x + self.mlp(self.mlp_norm(x))


class GptOssForCausalLM(nn.Module):
    """Language model with learned positions."""

    def __init__(self, *, weighted_bias: bool, vocab_size: int = 75, dim: int = 32) -> None:
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(vocab_size, dim), nn.Embedding(64, dim)
        self.layers = nn.ModuleList(Block(dim, 4, weighted_bias=weighted_bias) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed_tokens(input_ids)
        x = x + self.embed_positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def buggy() -> nn.Module:
    """Each chosen expert adds its complete bias."""
    return GptOssForCausalLM(weighted_bias=False)


def healthy() -> nn.Module:
    """The bias has the routing weight."""
    return GptOssForCausalLM(weighted_bias=True)


def buggy_declared() -> ModelSpec:
    """The model is causal."""
    return ModelSpec.of(buggy, causal=True, max_length=64)


def healthy_declared() -> ModelSpec:
    """The model is causal."""
    return ModelSpec.of(healthy, causal=True, max_length=64)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Output of the experts minus the weighted mean of the outputs of complete experts."""
    experts = model.layers[0].mlp.experts.double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 32, dtype=torch.float64, generator=generator)
    weights, indices = torch.tensor([[0.8, 0.2]] * 3).double(), torch.tensor([[0, 3], [2, 1], [3, 0]])
    expected = torch.zeros_like(x)
    for row in range(3):
        for weight, i in zip(weights[row], indices[row].tolist(), strict=True):
            gate, up = experts.gate_up[i](x[row]).chunk(2)
            expected[row] += weight * experts.down[i]((up + 1) * gate * torch.sigmoid(1.702 * gate))
    return experts(x, weights, indices) - expected

"""Automodel#1408 (NVIDIA-NeMo/Automodel): the gradient of the balancing loss never reaches the router.

`MoEAuxLossAutoScaler.apply` returns the weights with the loss attached to their graph. The gate discards the
result and returns the original weights, so the balancing loss is never differentiated.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import Facts, ModelSpec


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """Identity that adds the gradient of a loss in the backward pass."""

    @staticmethod
    def forward(ctx, output: torch.Tensor, aux_loss: torch.Tensor) -> torch.Tensor:
        """Return `output`."""
        ctx.save_for_backward(aux_loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient of the output, and 1 for the loss."""
        return grad_output, torch.ones_like(ctx.saved_tensors[0])


class Gate(nn.Module):
    """Router with softmax scores."""

    def __init__(self, dim: int, n_experts: int, *, keep_result: bool, aux_loss_coeff: float = 0.01) -> None:
        super().__init__()
        self.keep_result, self.aux_loss_coeff = keep_result, aux_loss_coeff
        self.topk, self.n_experts = 2, n_experts
        self.weight = nn.Parameter(torch.empty(n_experts, dim))
        nn.init.normal_(self.weight, std=dim**-0.5)

    def aux_loss(self, scores: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return the balancing loss, 1 for equal loads."""
        load = F.one_hot(indices, self.n_experts).sum(dim=1).to(scores.dtype).mean(dim=0) / self.topk
        return self.n_experts * (load * scores.mean(dim=0)).sum()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and indices (tokens, topk)."""
        scores = F.linear(x, self.weight).softmax(dim=-1)
        weights, indices = scores.topk(self.topk, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.training and self.aux_loss_coeff > 0:
            result = MoEAuxLossAutoScaler.apply(weights, self.aux_loss_coeff * self.aux_loss(scores, indices))
            weights = result if self.keep_result else weights
        return weights, indices


class MoE(nn.Module):
    """Experts and their gate."""

    def __init__(self, dim: int, n_experts: int, *, keep_result: bool) -> None:
        super().__init__()
        self.gate = Gate(dim, n_experts, keep_result=keep_result)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 24), nn.SiLU(), nn.Linear(24, dim)) for _ in range(n_experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (batch, time, dim)."""
        flat = x.flatten(0, 1)
        weights, indices = self.gate(flat)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, slot = (indices == i).nonzero(as_tuple=True)
            y = y.index_add(0, token, expert(flat[token]) * weights[token, slot, None])
        return y.view_as(x)


class Block(nn.Module):
    """Causal attention and experts."""

    def __init__(self, dim: int, *, keep_result: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.o_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = MoE(dim, 4, keep_result=keep_result)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to (batch, time, dim)."""
        q, k, v = (
            y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.input_layernorm(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3MoeForCausalLM(nn.Module):
    """Language model with learned positions."""

    def __init__(self, *, keep_result: bool, vocab_size: int = 64, dim: int = 32) -> None:
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(vocab_size, dim), nn.Embedding(64, dim)
        self.layers = nn.ModuleList(Block(dim, keep_result=keep_result) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits. In training, the backward pass adds the gradient of the balancing loss."""
        x = self.embed_tokens(input_ids) + self.embed_positions.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def buggy() -> nn.Module:
    """Discard the result of the scaler."""
    return Qwen3MoeForCausalLM(keep_result=False)


def healthy() -> nn.Module:
    """Return the result of the scaler."""
    return Qwen3MoeForCausalLM(keep_result=True)


FACTS = Facts(experts_per_token=2, routing_sum=1.0)


def buggy_declared() -> ModelSpec:
    """State a causal model that routes to 2 experts."""
    return ModelSpec.of(buggy, causal=True, max_length=64, facts=FACTS)


def healthy_declared() -> ModelSpec:
    """State a causal model that routes to 2 experts."""
    return ModelSpec.of(healthy, causal=True, max_length=64, facts=FACTS)


def observe(model: nn.Module) -> torch.Tensor:
    """Return the router's gradient under a loss of 0, minus that of the balancing loss, relative to it."""
    gate = model.layers[0].mlp.gate.train()
    x = torch.randn(12, 32, generator=torch.Generator().manual_seed(1))
    weights, indices = gate(x)
    (weights.sum() * 0).backward()
    scores = F.linear(x, gate.weight).softmax(dim=-1)
    loss = gate.aux_loss_coeff * gate.aux_loss(scores, indices)
    (expected,) = torch.autograd.grad(loss, gate.weight)
    return (gate.weight.grad - expected).norm() / expected.norm()

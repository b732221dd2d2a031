"""PaddleFormers#3452 (PaddlePaddle/PaddleFormers): routing weights contain the correction bias.

The bias should only influence which experts are chosen (noaux_tc). The router returns the scores with the
bias as weights of the experts, instead of gathering the scores without it.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import Facts, ModelSpec


class TopKRouter(nn.Module):
    """Router with sigmoid scores and a correction bias."""

    def __init__(self, hidden_size: int, num_experts: int, *, unbiased_weights: bool) -> None:
        super().__init__()
        self.unbiased_weights = unbiased_weights
        self.num_experts_per_tok, self.norm_topk_prob, self.routed_scaling_factor = 2, True, 1.0
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)
        # as in a checkpoint: balancing has moved the biases away from 0
        self.register_buffer("e_score_correction_bias", torch.empty(num_experts).uniform_(-0.2, 0.4))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and indices (tokens, num_experts_per_tok)."""
        gates = F.linear(hidden_states, self.weight).sigmoid()
        scores_for_choice = gates + self.e_score_correction_bias
        topk_weight, topk_idx = scores_for_choice.topk(self.num_experts_per_tok, dim=-1)
        if self.unbiased_weights:
            topk_weight = gates.gather(1, topk_idx)
        if self.norm_topk_prob:
            topk_weight = topk_weight / (topk_weight.sum(dim=-1, keepdim=True) + 1e-20)
        return topk_weight * self.routed_scaling_factor, topk_idx


class Glm4MoeMLP(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the network to (..., hidden_size)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoELayer(nn.Module):
    """Routed experts and a shared expert."""

    def __init__(self, hidden_size: int, num_experts: int, *, unbiased_weights: bool) -> None:
        super().__init__()
        self.gate = TopKRouter(hidden_size, num_experts, unbiased_weights=unbiased_weights)
        self.experts = nn.ModuleList(Glm4MoeMLP(hidden_size, 24) for _ in range(num_experts))
        self.shared_experts = Glm4MoeMLP(hidden_size, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (batch, time, hidden_size)."""
        flat = x.flatten(0, 1)
        topk_weight, topk_idx = self.gate(flat)
        dense = torch.zeros(len(flat), len(self.experts), dtype=x.dtype, device=x.device)
        dense = dense.scatter(1, topk_idx, topk_weight)
        outputs = torch.stack([expert(flat) for expert in self.experts], dim=1)
        return (dense[..., None] * outputs).sum(dim=1).view_as(x) + self.shared_experts(x)


class Glm4MoeDecoderLayer(nn.Module):
    """Causal attention with a padding mask, and mixture of experts."""

    def __init__(self, hidden_size: int, *, unbiased_weights: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden_size), nn.RMSNorm(hidden_size)
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.mlp = MoELayer(hidden_size, 6, unbiased_weights=unbiased_weights)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Apply the layer; `mask` is true where a query may see a key."""
        qkv = self.qkv_proj(self.input_layernorm(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in qkv)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = x + self.o_proj(y)
        return x + self.mlp(self.post_attention_layernorm(x))


class Glm4MoeForCausalLM(nn.Module):
    """Language model with learned positions, for rows padded on the right."""

    def __init__(self, *, unbiased_weights: bool, vocab_size: int = 70, hidden_size: int = 32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.embed_pos = nn.Embedding(64, hidden_size)
        layers = (Glm4MoeDecoderLayer(hidden_size, unbiased_weights=unbiased_weights) for _ in range(2))
        self.layers = nn.ModuleList(layers)
        self.norm, self.lm_head = nn.RMSNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> SimpleNamespace:
        """Return an output with `logits`."""
        t = input_ids.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool, device=input_ids.device).tril()[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None].bool()
        x = self.embed_tokens(input_ids) + self.embed_pos.weight[:t]
        for layer in self.layers:
            x = layer(x, mask)
        return SimpleNamespace(logits=self.lm_head(self.norm(x)))


def buggy() -> nn.Module:
    """Weights with the correction bias."""
    return Glm4MoeForCausalLM(unbiased_weights=False)


def healthy() -> nn.Module:
    """Weights without the correction bias."""
    return Glm4MoeForCausalLM(unbiased_weights=True)


FACTS = Facts(experts_per_token=2, routing_sum=1.0)


def buggy_declared() -> ModelSpec:
    """State a causal model, padded on the right, that routes to 2 experts."""
    return ModelSpec.of(buggy, causal=True, max_length=64, padding_sides=("right",), facts=FACTS)


def healthy_declared() -> ModelSpec:
    """State a causal model, padded on the right, that routes to 2 experts."""
    return ModelSpec.of(healthy, causal=True, max_length=64, padding_sides=("right",), facts=FACTS)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return weights of the chosen experts minus their normalised sigmoid scores."""
    gate = model.layers[0].mlp.gate
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    weights, indices = gate(x)
    scores = F.linear(x, gate.weight).sigmoid().gather(1, indices)
    return weights - scores / scores.sum(dim=-1, keepdim=True)

"""sglang#3705 (sgl-project/sglang): group-limited routing gives experts of masked groups the score 0.

Only experts of the best groups may be chosen. Those of the other groups get the score 0 instead of minus
infinity, so they win if the scores plus correction bias of the remaining experts are negative.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import Facts, ModelSpec


class MoEGate(nn.Module):
    """Router of DeepSeek-V3 with groups of experts."""

    def __init__(self, hidden_size: int, n_routed_experts: int, *, mask_value: float) -> None:
        super().__init__()
        self.mask_value = mask_value
        self.num_expert_group, self.topk_group, self.topk = 4, 2, 3
        self.weight = nn.Parameter(torch.empty(n_routed_experts, hidden_size))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)
        # a checkpoint has biases of both signs: balancing has raised some and lowered others
        bias = torch.empty(n_routed_experts).normal_(std=0.5)
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and indices (tokens, topk) of the chosen experts."""
        scores = F.linear(hidden_states, self.weight).sigmoid()
        scores_for_choice = scores + self.e_score_correction_bias
        grouped = scores_for_choice.unflatten(-1, (self.num_expert_group, -1))
        group_idx = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(self.topk_group, dim=-1).indices
        group_mask = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device)
        group_mask = group_mask.scatter(1, group_idx, True)
        tmp_scores = grouped.masked_fill(~group_mask[..., None], self.mask_value).flatten(1)
        topk_ids = tmp_scores.topk(self.topk, dim=-1).indices
        topk_weights = scores.gather(1, topk_ids)
        return topk_weights / topk_weights.sum(dim=-1, keepdim=True), topk_ids


class MLP(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the network to (..., hidden_size)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DeepseekV2MoE(nn.Module):
    """Shared expert plus routed experts."""

    def __init__(self, hidden_size: int, n_routed_experts: int, *, mask_value: float) -> None:
        super().__init__()
        self.gate = MoEGate(hidden_size, n_routed_experts, mask_value=mask_value)
        self.experts = nn.ModuleList(MLP(hidden_size, 16) for _ in range(n_routed_experts))
        self.shared_experts = MLP(hidden_size, 32)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (batch, time, hidden_size)."""
        flat = hidden_states.flatten(0, 1)
        topk_weights, topk_ids = self.gate(flat)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, slot = (topk_ids == i).nonzero(as_tuple=True)
            y = y.index_add(0, token, expert(flat[token]) * topk_weights[token, slot, None])
        return y.view_as(hidden_states) + self.shared_experts(hidden_states)


class DecoderLayer(nn.Module):
    """Causal attention and mixture of experts."""

    def __init__(self, hidden_size: int, *, mask_value: float) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden_size), nn.RMSNorm(hidden_size)
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.mlp = DeepseekV2MoE(hidden_size, 8, mask_value=mask_value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (batch, time, hidden_size)."""
        qkv = self.qkv_proj(self.input_layernorm(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o_proj(y)
        return x + self.mlp(self.post_attention_layernorm(x))


class DeepseekV3ForCausalLM(nn.Module):
    """Language model with learned positions."""

    def __init__(self, *, mask_value: float, vocab_size: int = 64, hidden_size: int = 32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.embed_pos = nn.Embedding(48, hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(hidden_size, mask_value=mask_value) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed_tokens(input_ids) + self.embed_pos.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def buggy() -> nn.Module:
    """Score 0 for masked groups."""
    return DeepseekV3ForCausalLM(mask_value=0.0)


def healthy() -> nn.Module:
    """Score minus infinity for masked groups."""
    return DeepseekV3ForCausalLM(mask_value=-torch.inf)


FACTS = Facts(experts_per_token=3, routing_sum=1.0)


def buggy_declared() -> ModelSpec:
    """State a causal model that routes to 3 experts."""
    return ModelSpec.of(buggy, causal=True, max_length=48, facts=FACTS)


def healthy_declared() -> ModelSpec:
    """State a causal model that routes to 3 experts."""
    return ModelSpec.of(healthy, causal=True, max_length=48, facts=FACTS)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the number of chosen experts outside the two best groups, with a bias of -1 for all experts."""
    gate = model.layers[0].mlp.gate
    gate.e_score_correction_bias.fill_(-1.0)
    x = torch.randn(20, 32, generator=torch.Generator().manual_seed(1))
    chosen = gate(x)[1] // 2
    scores = F.linear(x, gate.weight).sigmoid().unflatten(-1, (4, 2)).sum(dim=-1)
    best = scores.topk(2, dim=-1).indices
    return (chosen[..., None] != best[:, None]).all(dim=-1).sum()

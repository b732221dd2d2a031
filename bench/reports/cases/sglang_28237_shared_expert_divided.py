"""sglang#28237 (sgl-project/sglang): the shared expert is divided by `routed_scaling_factor`.

It is a further expert of each token, with a weight that undoes a later multiplication of the whole output. On
this path the factor is in the weights of the routed experts already, and nothing is multiplied later.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec, RotaryClaim


@dataclass
class DeepseekConfig:
    """Sizes of the model."""

    vocab_size: int = 72
    hidden_size: int = 32
    moe_intermediate_size: int = 24
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    n_routed_experts: int = 6
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 2.5


class DeepseekV2MLP(nn.Module):
    """Gated feed-forward network."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the network to (tokens, hidden_size)."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DeepseekV2MoE(nn.Module):
    """Routed experts, and one that each token uses; it is the last of the list."""

    def __init__(self, config: DeepseekConfig, shared_weight: float) -> None:
        super().__init__()
        self.config, self.shared_weight = config, shared_weight
        self.gate = nn.Linear(config.hidden_size, config.n_routed_experts, bias=False)
        self.experts = nn.ModuleList(DeepseekV2MLP(config) for _ in range(config.n_routed_experts + 1))

    def topk(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and ids of the experts of each token, with the shared expert as the last one."""
        scores = self.gate(hidden_states).sigmoid()
        weights, ids = scores.topk(self.config.num_experts_per_tok, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True) * self.config.routed_scaling_factor
        weights = torch.cat([weights, torch.full_like(weights[:, :1], self.shared_weight)], dim=-1)
        ids = torch.cat([ids, torch.full_like(ids[:, :1], self.config.n_routed_experts)], dim=-1)
        return weights, ids

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply the block to (batch, time, hidden_size)."""
        x = hidden_states.flatten(0, 1)
        topk_weights, topk_ids = self.topk(x)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = (topk_ids == i).nonzero(as_tuple=True)
            y = y.index_add(0, token, expert(x[token]) * topk_weights[token, slot, None])
        return y.view_as(hidden_states)


class DeepseekV2DecoderLayer(nn.Module):
    """Causal attention with rotary positions, and experts."""

    def __init__(self, config: DeepseekConfig, shared_weight: float) -> None:
        super().__init__()
        width, self.num_heads = config.hidden_size, config.num_attention_heads
        self.qkv_proj, self.o_proj = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.mlp = DeepseekV2MoE(config, shared_weight)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (batch, time, hidden_size)."""
        qkv = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = (y.transpose(1, 2) for y in qkv.unbind(2))
        half = q.shape[-1] // 2
        freqs = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
        cos, sin = (positions[:, None] * freqs).cos(), (positions[:, None] * freqs).sin()
        q, k = (
            torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
            for a, b in (q.chunk(2, dim=-1), k.chunk(2, dim=-1))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class DeepseekV2ForCausalLM(nn.Module):
    """Language model."""

    def __init__(self, config: DeepseekConfig, shared_weight: float) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DeepseekV2DecoderLayer(config, shared_weight) for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits; `positions` is (time,)."""
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(positions, x)
        return self.lm_head(self.norm(x))


def buggy() -> nn.Module:
    """The weight that undoes the factor."""
    config = DeepseekConfig()
    return DeepseekV2ForCausalLM(config, 1 / config.routed_scaling_factor)


def healthy() -> nn.Module:
    """A weight of 1."""
    return DeepseekV2ForCausalLM(DeepseekConfig(), 1.0)


def buggy_declared() -> ModelSpec:
    """State a causal model with rotary positions."""
    return ModelSpec.of(buggy, causal=True, rotary=RotaryClaim(theta=10000.0, layout="halves"))


def healthy_declared() -> ModelSpec:
    """State a causal model with rotary positions."""
    return ModelSpec.of(healthy, causal=True, rotary=RotaryClaim(theta=10000.0, layout="halves"))


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the output of the experts minus the routed sum times the factor plus the shared expert."""
    mlp, x = model.layers[0].mlp, torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    scores = mlp.gate(x).sigmoid()
    chosen = scores >= scores.topk(2, dim=-1).values[..., 1:]
    weights = scores * chosen / (scores * chosen).sum(dim=-1, keepdim=True)
    routed = sum(weights[..., i, None] * mlp.experts[i](x) for i in range(6))
    return mlp(x) - (2.5 * routed + mlp.experts[6](x))

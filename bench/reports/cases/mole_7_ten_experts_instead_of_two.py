"""MoLE#7 (JieShibo/MoLE): the router of the baseline chooses 10 experts, not the 2 of the configuration.

A number left from an ablation is passed to `topk`, so `num_experts_per_tok` has no effect.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import Facts, ModelSpec


@dataclass
class MoeConfig:
    """Sizes of the model."""

    vocab_size: int = 72
    hidden_size: int = 32
    moe_intermediate_size: int = 12
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_experts: int = 12
    num_experts_per_tok: int = 2
    max_position_embeddings: int = 64


@dataclass
class MoeCausalLMOutput:
    """Logits, and loss if there are labels."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class SparseMoeBlock(nn.Module):
    """Experts with weights that sum to 1."""

    def __init__(self, config: MoeConfig, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        width, inner, n = config.hidden_size, config.moe_intermediate_size, config.num_experts
        self.gate = nn.Linear(width, n, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width)) for _ in range(n)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply the block to (batch, time, hidden_size)."""
        x = hidden_states.flatten(0, 1)
        router_logits = self.gate(x)
        routing_weights, selected_experts = torch.topk(router_logits, self.top_k, dim=-1)
        routing_weights = routing_weights.softmax(dim=-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = (selected_experts == i).nonzero(as_tuple=True)
            y = y.index_add(0, token, expert(x[token]) * routing_weights[token, slot, None])
        return y.view_as(hidden_states)


class DecoderLayer(nn.Module):
    """Causal attention and experts."""

    def __init__(self, config: MoeConfig, top_k: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.mlp = SparseMoeBlock(config, top_k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (batch, time, hidden_size)."""
        y = self.input_layernorm(x)
        q, k, v = (
            p(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class MoeForCausalLM(nn.Module):
    """Language model with learned positions."""

    def __init__(self, config: MoeConfig, top_k: int) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, top_k) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> MoeCausalLMOutput:
        """Return logits, and the loss of the next token if there are labels."""
        x = self.embed_tokens(input_ids) + self.embed_positions.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits, loss = self.lm_head(self.norm(x)), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return MoeCausalLMOutput(loss=loss, logits=logits)


def buggy() -> nn.Module:
    """Choose 10 experts."""
    return MoeForCausalLM(MoeConfig(), top_k=10)


def healthy() -> nn.Module:
    """Choose the number of experts of the configuration."""
    config = MoeConfig()
    return MoeForCausalLM(config, top_k=config.num_experts_per_tok)


FACTS = Facts(experts_per_token=2, routing_sum=1.0)


def buggy_declared() -> ModelSpec:
    """State a causal model that routes to 2 experts."""
    return ModelSpec.of(buggy, causal=True, max_length=64, facts=FACTS)


def healthy_declared() -> ModelSpec:
    """State a causal model that routes to 2 experts."""
    return ModelSpec.of(healthy, causal=True, max_length=64, facts=FACTS)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the number of experts that run for a single token, minus that of the configuration."""
    rows: list[int] = []
    for expert in model.layers[0].mlp.experts:
        expert.register_forward_hook(lambda *call: rows.append(len(call[-1])))
    model(torch.tensor([[3]]))
    return torch.tensor(sum(rows) - model.config.num_experts_per_tok)

"""transformers#28093 (huggingface/transformers): Mixtral's load balancing loss is always the same number.

The probability of an expert is taken as the mean over the weights of the chosen experts, which sum to 1. It
is the same for all experts and tokens, so the loss is constant and its gradient is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import Facts, ModelSpec

NUM_EXPERTS, TOP_K, ROUTER_AUX_LOSS_COEF = 6, 2, 0.02


def load_balancing_loss_func(
    gate_logits: torch.Tensor, keep: torch.Tensor, *, probability_of_experts: bool
) -> torch.Tensor:
    """Return the loss of `gate_logits` (tokens, experts); `keep` (tokens,) excludes padding."""
    routing_weights = gate_logits.softmax(dim=-1)
    top_weights, selected_experts = routing_weights.topk(TOP_K, dim=-1)
    expert_mask = F.one_hot(selected_experts, NUM_EXPERTS).amax(dim=1)
    weight = keep[:, None].to(gate_logits.dtype) / keep.sum()
    tokens_per_expert = (expert_mask * weight).sum(dim=0)
    if probability_of_experts:
        router_prob = (routing_weights * weight).sum(dim=0)
    else:
        top_weights = top_weights / top_weights.sum(dim=-1, keepdim=True)
        router_prob = (top_weights.mean(dim=-1, keepdim=True) * weight).sum(dim=0)
    return NUM_EXPERTS * (tokens_per_expert * router_prob).sum()


@dataclass
class MoeCausalLMOutput:
    """Output of the language model."""

    loss: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class MixtralSparseMoeBlock(nn.Module):
    """Experts with normalised weights."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden_size, 24), nn.SiLU(), nn.Linear(24, hidden_size))
            for _ in range(NUM_EXPERTS)
        )

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output (batch, time, hidden_size) and router logits (tokens, experts)."""
        x = hidden_states.flatten(0, 1)
        router_logits = self.gate(x)
        weights, selected = router_logits.softmax(dim=-1).topk(TOP_K, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = (selected == i).nonzero(as_tuple=True)
            y = y.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return y.view_as(hidden_states), router_logits


class MixtralDecoderLayer(nn.Module):
    """Causal attention and experts."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden_size), nn.RMSNorm(hidden_size)
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.block_sparse_moe = MixtralSparseMoeBlock(hidden_size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the router logits."""
        qkv = self.qkv_proj(self.input_layernorm(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in qkv)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        y, router_logits = self.block_sparse_moe(self.post_attention_layernorm(x))
        return x + y, router_logits


class MixtralForCausalLM(nn.Module):
    """Language model with learned positions, for rows padded on the right."""

    def __init__(self, *, probability_of_experts: bool, vocab_size: int = 66, hidden_size: int = 32) -> None:
        super().__init__()
        self.probability_of_experts = probability_of_experts
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.embed_positions = nn.Embedding(64, hidden_size)
        self.layers = nn.ModuleList(MixtralDecoderLayer(hidden_size) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> MoeCausalLMOutput:
        """Return logits, the mean balancing loss of the layers, and the total loss if there are labels."""
        t = input_ids.shape[1]
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mask = torch.ones(t, t, dtype=torch.bool, device=input_ids.device).tril() & keep[:, None, None].bool()
        x, aux_loss = self.embed_tokens(input_ids) + self.embed_positions.weight[:t], 0.0
        for layer in self.layers:
            x, router_logits = layer(x, mask)
            aux_loss = aux_loss + load_balancing_loss_func(
                router_logits, keep.flatten(), probability_of_experts=self.probability_of_experts
            ) / len(self.layers)
        logits, loss = self.lm_head(self.norm(x)), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
            loss = loss + ROUTER_AUX_LOSS_COEF * aux_loss
        return MoeCausalLMOutput(loss=loss, aux_loss=aux_loss, logits=logits)


def buggy() -> nn.Module:
    """Mean weight of the chosen experts as probability."""
    return MixtralForCausalLM(probability_of_experts=False)


def healthy() -> nn.Module:
    """Mean probability of each expert."""
    return MixtralForCausalLM(probability_of_experts=True)


def _auxiliary_loss(model: nn.Module, ids: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    return model(ids, attention_mask=None if keep is None else keep.long()).aux_loss


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model, padded on the right, with an auxiliary loss of routers."""
    facts = Facts(experts_per_token=TOP_K, routing_sum=1.0, router_loss=ROUTER_AUX_LOSS_COEF)
    return ModelSpec.of(
        make,
        causal=True,
        max_length=64,
        padding_sides=("right",),
        masked=lambda model, ids, keep: model(ids, attention_mask=keep.long()),
        auxiliary_loss=_auxiliary_loss,
        facts=facts,
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the balancing loss of perfectly balanced tokens, minus the number of experts of a token."""
    eye = torch.eye(NUM_EXPERTS)
    loss = load_balancing_loss_func(
        5 * eye + 4 * eye.roll(1, 0),
        torch.ones(NUM_EXPERTS),
        probability_of_experts=model.probability_of_experts,
    )
    return loss - TOP_K

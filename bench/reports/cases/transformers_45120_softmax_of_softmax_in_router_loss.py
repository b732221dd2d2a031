"""transformers#45120 (huggingface/transformers): the balancing loss takes the softmax of probabilities.

The router stores its probabilities in `router_logits` and returns them. `load_balancing_loss_func` expects
logits, and applies the softmax again. The probabilities of all experts are then nearly equal, so the loss
hardly reacts to the routing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import Facts, ModelSpec, RotaryClaim

NUM_EXPERTS, TOP_K, HEADS, ROUTER_AUX_LOSS_COEF = 4, 2, 4, 0.02


def load_balancing_loss_func(gate_logits: tuple[Tensor, ...], attention_mask: Tensor | None) -> Tensor:
    """Return the mean loss of the layers; `gate_logits` has (tokens, experts) of each layer."""
    loss = gate_logits[0].new_zeros(())
    for logits in gate_logits:
        routing_weights = logits.softmax(dim=-1)
        selected_experts = routing_weights.topk(TOP_K, dim=-1).indices
        expert_mask = F.one_hot(selected_experts, NUM_EXPERTS).sum(dim=1).to(logits.dtype)
        keep = logits.new_ones(len(logits)) if attention_mask is None else attention_mask.flatten().to(logits)
        keep = keep[:, None] / keep.sum()
        tokens_per_expert = (expert_mask * keep).sum(dim=0)
        router_prob_per_expert = (routing_weights * keep).sum(dim=0)
        loss = loss + NUM_EXPERTS * (tokens_per_expert * router_prob_per_expert).sum() / len(gate_logits)
    return loss


@dataclass
class MoeCausalLMOutput:
    """Output of the language model."""

    loss: Tensor | None = None
    aux_loss: Tensor | None = None
    logits: Tensor | None = None


class Qwen2MoeTopKRouter(nn.Module):
    """Router that returns its logits, and the weights and indices of the chosen experts."""

    def __init__(self, hidden_size: int, *, keep_logits: bool) -> None:
        super().__init__()
        self.keep_logits = keep_logits
        self.weight = nn.Parameter(torch.empty(NUM_EXPERTS, hidden_size))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`hidden_states` is (tokens, hidden_size)."""
        router_logits = F.linear(hidden_states, self.weight)
        router_probs = router_logits.softmax(dim=-1)
        if not self.keep_logits:
            router_logits = router_probs
        router_top_value, router_indices = router_probs.topk(TOP_K, dim=-1)
        router_top_value = router_top_value / router_top_value.sum(dim=-1, keepdim=True)
        return router_logits, router_top_value, router_indices


class Qwen2MoeMLP(nn.Module):
    """Gated MLP."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to the last dimension."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Qwen2MoeSparseMoeBlock(nn.Module):
    """Chosen experts, and a gated expert for all tokens."""

    def __init__(self, hidden_size: int, *, keep_logits: bool) -> None:
        super().__init__()
        self.gate = Qwen2MoeTopKRouter(hidden_size, keep_logits=keep_logits)
        self.experts = nn.ModuleList(Qwen2MoeMLP(hidden_size, 24) for _ in range(NUM_EXPERTS))
        self.shared_expert = Qwen2MoeMLP(hidden_size, 24)
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (batch, time, hidden_size) and router logits (tokens, experts)."""
        x = hidden_states.flatten(0, 1)
        router_logits, weights, indices = self.gate(x)
        y = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        for i, expert in enumerate(self.experts):
            token, slot = (indices == i).nonzero(as_tuple=True)
            y = y.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return y.view_as(hidden_states), router_logits


def apply_rotary_pos_emb(x: Tensor, position_ids: Tensor) -> Tensor:
    """Rotate (batch, heads, time, head_dim)."""
    half = x.shape[-1] // 2
    inv_freq = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = position_ids.to(x.dtype)[:, None, :, None] * inv_freq
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class Qwen2MoeDecoderLayer(nn.Module):
    """Causal attention and experts."""

    def __init__(self, hidden_size: int, *, keep_logits: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden_size, hidden_size) for _ in range(3))
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.mlp = Qwen2MoeSparseMoeBlock(hidden_size, keep_logits=keep_logits)

    def forward(self, x: Tensor, mask: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the router logits."""
        h = self.input_layernorm(x)
        q, k, v = (
            p(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, position_ids), apply_rotary_pos_emb(k, position_ids)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        y, router_logits = self.mlp(self.post_attention_layernorm(x))
        return x + y, router_logits


class Qwen2MoeForCausalLM(nn.Module):
    """Language model for rows padded on the right."""

    def __init__(self, *, keep_logits: bool, vocab_size: int = 54, hidden_size: int = 32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(
            Qwen2MoeDecoderLayer(hidden_size, keep_logits=keep_logits) for _ in range(2)
        )
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> MoeCausalLMOutput:
        """Return logits, the balancing loss, and the total loss if there are labels."""
        t = input_ids.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool, device=input_ids.device).tril()[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None].bool()
        position_ids = torch.arange(t, device=input_ids.device)[None]
        x, router_logits = self.embed_tokens(input_ids), []
        for layer in self.layers:
            x, logits = layer(x, mask, position_ids)
            router_logits.append(logits)
        aux_loss = load_balancing_loss_func(tuple(router_logits), attention_mask)
        logits, loss = self.lm_head(self.norm(x)), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
            loss = loss + ROUTER_AUX_LOSS_COEF * aux_loss
        return MoeCausalLMOutput(loss=loss, aux_loss=aux_loss, logits=logits)


def buggy() -> nn.Module:
    """Return probabilities as `router_logits`."""
    return Qwen2MoeForCausalLM(keep_logits=False)


def healthy() -> nn.Module:
    """Return the logits of the router."""
    return Qwen2MoeForCausalLM(keep_logits=True)


def _auxiliary_loss(model: nn.Module, ids: Tensor, keep: Tensor | None) -> Tensor:
    return model(ids, attention_mask=None if keep is None else keep.long()).aux_loss


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model with two experts for each token and a balancing loss of coefficient 0.02."""
    return ModelSpec.of(
        make,
        causal=True,
        padding_sides=("right",),
        masked=lambda model, ids, keep: model(ids, attention_mask=keep.long()),
        auxiliary_loss=_auxiliary_loss,
        rotary=RotaryClaim(theta=10000.0, dim=8),
        facts=Facts(experts_per_token=TOP_K, routing_sum=1.0, router_loss=ROUTER_AUX_LOSS_COEF),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the first output of the router minus its logits."""
    gate = model.layers[0].mlp.gate
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    return gate(x)[0] - F.linear(x, gate.weight)

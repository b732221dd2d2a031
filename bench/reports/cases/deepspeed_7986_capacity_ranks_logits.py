"""DeepSpeed#7986 (deepspeedai/DeepSpeed): the capacity of experts drops tokens whose logits are negative.

The tokens of an expert are ranked by their logits, and those of other experts have 0 there. A token that
chose the expert with a negative logit ranks below them, and is dropped although the expert has room.
Probabilities have to be ranked instead.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


class TopKGate(nn.Module):
    """Choice of `k` experts for each token, with a largest number of tokens for each expert."""

    def __init__(self, model_dim: int, num_experts: int, k: int, *, ranks_logits: bool) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k, self.ranks_logits = k, ranks_logits
        self.capacity_factor, self.eval_capacity_factor = 1.5, 2.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the balancing loss, and the weights (tokens, experts), which are 0 if not chosen."""
        logits = self.wg(x)
        gates = logits.softmax(dim=1)
        top_idx = logits.topk(self.k, dim=1).indices
        mask = torch.zeros_like(gates).scatter(1, top_idx, 1.0)
        n_tokens, n_experts = gates.shape
        l_aux = (gates.mean(dim=0) * mask.mean(dim=0)).mean() * n_experts * n_experts / self.k
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        capacity = min(n_tokens, math.ceil(self.k * n_tokens / n_experts * factor))
        topk_masked_gates = (logits if self.ranks_logits else gates) * mask
        kept = topk_masked_gates.topk(capacity, dim=0).indices
        mask = mask * torch.zeros_like(mask).scatter(0, kept, 1.0)
        weights = gates * mask
        return l_aux, weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-9)


class MOELayer(nn.Module):
    """Experts with a gate."""

    def __init__(self, model_dim: int, num_experts: int, k: int, *, ranks_logits: bool) -> None:
        super().__init__()
        self.gate = TopKGate(model_dim, num_experts, k, ranks_logits=ranks_logits)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(model_dim, 48), nn.GELU(), nn.Linear(48, model_dim))
            for _ in range(num_experts)
        )

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output (batch, time, model_dim) and the balancing loss."""
        x = hidden_states.flatten(0, 1)
        l_aux, weights = self.gate(x)
        y = sum(weights[:, i, None] * expert(x) for i, expert in enumerate(self.experts))
        return y.view_as(hidden_states), l_aux


class EncoderLayer(nn.Module):
    """Post-norm layer of an encoder, with experts."""

    def __init__(self, model_dim: int, *, ranks_logits: bool) -> None:
        super().__init__()
        self.attn_qkvw, self.attn_ow = nn.Linear(model_dim, 3 * model_dim), nn.Linear(model_dim, model_dim)
        self.moe = MOELayer(model_dim, num_experts=4, k=2, ranks_logits=ranks_logits)
        self.attn_norm, self.norm = nn.LayerNorm(model_dim), nn.LayerNorm(model_dim)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the balancing loss."""
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.attn_qkvw(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.attn_norm(x + self.attn_ow(y))
        y, l_aux = self.moe(x)
        return self.norm(x + y), l_aux


class EncoderForMaskedLM(nn.Module):
    """Encoder whose loss includes that of the gates."""

    def __init__(self, *, ranks_logits: bool, vocab_size: int = 72, model_dim: int = 32) -> None:
        super().__init__()
        self.word_embeddings, self.position_embeddings = (
            nn.Embedding(vocab_size, model_dim),
            nn.Embedding(64, model_dim),
        )
        self.layers = nn.ModuleList(EncoderLayer(model_dim, ranks_logits=ranks_logits) for _ in range(2))
        self.decoder = nn.Linear(model_dim, vocab_size)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        """Return logits, the balancing loss, and the loss of the labels (not shifted) if there are any."""
        x, l_aux = (
            self.word_embeddings(input_ids) + self.position_embeddings.weight[: input_ids.shape[1]],
            0.0,
        )
        for layer in self.layers:
            x, layer_aux = layer(x)
            l_aux = l_aux + layer_aux
        logits, loss = self.decoder(x), None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * l_aux
        return SimpleNamespace(loss=loss, logits=logits, l_aux=l_aux)


def buggy() -> nn.Module:
    """Rank logits."""
    return EncoderForMaskedLM(ranks_logits=True)


def healthy() -> nn.Module:
    """Rank probabilities."""
    return EncoderForMaskedLM(ranks_logits=False)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State an encoder, its loss and that of its gates."""
    return ModelSpec.of(
        make,
        causal=False,
        max_length=64,
        loss=lambda model, ids: model(ids, labels=ids).loss,
        auxiliary_loss=lambda model, ids, _keep: 0.01 * model(ids).l_aux,
    )


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the numbers of tokens that each expert loses in training, beyond those above its capacity."""
    gate = model.train().layers[0].moe.gate
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    chosen = gate.wg(x).topk(2, dim=1).indices.flatten().bincount(minlength=4)
    kept = (gate(x)[1] > 0).sum(dim=0)
    return chosen.clamp(max=48) - kept

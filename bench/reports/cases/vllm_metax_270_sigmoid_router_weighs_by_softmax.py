"""vLLM-metax#270 (MetaX-MACA/vLLM-metax): a router with sigmoid scores gets softmax weights at one shape.

The kernel for 128 experts, of which 8 are used, takes the weights of `topk_softmax`. The chosen experts are
right. https://github.com/MetaX-MACA/vLLM-metax/issues/270
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import Facts, ModelSpec

VOCAB, DIM, HEADS, EXPERT = 64, 32, 4, 8


def topk_sigmoid(gating_output: Tensor, topk: int, *, own_branch: bool) -> tuple[Tensor, Tensor]:
    """Weights and ids of the experts with the largest scores."""
    scores = gating_output.sigmoid()
    topk_ids = scores.topk(topk, dim=-1).indices
    if (gating_output.shape[-1], topk) == (128, 8) and not own_branch:
        scores = gating_output.softmax(dim=-1)
    return scores.gather(-1, topk_ids), topk_ids


class FusedMoE(nn.Module):
    """Routed experts with a gated MLP, whose weights do not sum to one."""

    def __init__(self, num_experts: int, top_k: int, *, own_branch: bool) -> None:
        super().__init__()
        self.top_k, self.own_branch = top_k, own_branch
        self.gate = nn.Linear(DIM, num_experts, bias=False)
        self.w13 = nn.Parameter(torch.randn(num_experts, 2 * EXPERT, DIM) * DIM**-0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, DIM, EXPERT) * EXPERT**-0.5 / top_k)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.flatten(0, -2)
        topk_weights, topk_ids = topk_sigmoid(self.gate(x), self.top_k, own_branch=self.own_branch)
        out = torch.zeros_like(x)
        for expert in topk_ids.unique().tolist():
            token, slot = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], self.w13[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.w2[expert])
            out = out.index_add(0, token, y * topk_weights[token, slot, None])
        return out.view_as(hidden_states)


class DecoderLayer(nn.Module):
    """Causal attention and experts, each after its norm."""

    def __init__(self, num_experts: int, top_k: int, *, own_branch: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(DIM, 1e-6), nn.RMSNorm(DIM, 1e-6)
        self.qkv_proj, self.o_proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.mlp = FusedMoE(num_experts, top_k, own_branch=own_branch)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv_proj(self.input_layernorm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.o_proj(F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class MoeForCausalLM(nn.Module):
    """Language model with learned positions."""

    def __init__(self, *, own_branch: bool, num_experts: int = 128, top_k: int = 8) -> None:
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
        self.layers = nn.ModuleList(DecoderLayer(num_experts, top_k, own_branch=own_branch) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(DIM, 1e-6), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids) + self.embed_positions.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def buggy() -> nn.Module:
    return MoeForCausalLM(own_branch=False)


def healthy() -> nn.Module:
    return MoeForCausalLM(own_branch=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    return ModelSpec.of(make, causal=True, max_length=64, facts=Facts(experts_per_token=8))


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Ratio of the output of the experts to that with the sigmoid of the router as the weights."""
    mlp, x = model.layers[0].mlp, torch.randn(1, DIM, generator=torch.Generator().manual_seed(1))
    scores, ids = mlp.gate(x)[0].sigmoid().topk(8)
    gate, up = (mlp.w13[ids] @ x[0]).chunk(2, dim=-1)
    expected = torch.einsum("k,kde,ke->d", scores, mlp.w2[ids], F.silu(gate) * up)
    return (mlp(x)[0] / expected)[:8]

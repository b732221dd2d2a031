"""vLLM#13474 (vllm-project/vllm): DeepSeek-V3 chooses groups of experts by their best expert only.

With a correction bias, the score of a group is the sum of its two best scores. The grouped top-k takes the
maximum, as without a bias, and so selects other experts. https://github.com/vllm-project/vllm/pull/13474
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


def grouped_topk(
    scores: Tensor, bias: Tensor, *, groups: int, topk_group: int, topk: int, sum_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Return normalised weights and indices (tokens, topk) of experts of the best groups."""
    choice = (scores + bias).unflatten(-1, (groups, -1))
    group_scores = choice.topk(2, dim=-1)[0].sum(-1) if sum_of_two else choice.amax(-1)
    is_open = torch.zeros_like(group_scores, dtype=torch.bool)
    is_open = is_open.scatter(-1, group_scores.topk(topk_group, dim=-1)[1], True)
    indices = choice.masked_fill(~is_open[..., None], -torch.inf).flatten(-2).topk(topk, dim=-1)[1]
    weights = scores.gather(-1, indices)
    return weights / weights.sum(-1, keepdim=True), indices


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate `x` (batch, heads, time, dim) by positions (batch, time)."""
    half = x.shape[-1] // 2
    inv_freq = 10000.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angle = positions[:, None, :, None].to(x.dtype) * inv_freq
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


class MLP(nn.Module):
    """Gated MLP; the shared expert, or one of the routed experts."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(dim, 2 * hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to the last dimension."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DeepseekMoE(nn.Module):
    """16 experts in 4 groups; each token uses 4 experts of 2 groups, and the shared expert."""

    def __init__(self, dim: int, *, sum_of_two: bool) -> None:
        super().__init__()
        self.sum_of_two, self.routed_scaling_factor = sum_of_two, 2.5
        self.gate = nn.Linear(dim, 16, bias=False)
        # Balanced in training without a gradient; here the values of a trained model.
        self.register_buffer("e_score_correction_bias", 0.1 * (5.0 * torch.arange(16.0)).sin())
        self.experts = nn.ModuleList(MLP(dim, dim) for _ in range(16))
        self.shared_experts = MLP(dim, dim)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and indices of the experts of tokens (tokens, dim)."""
        return grouped_topk(
            self.gate(x).sigmoid(),
            self.e_score_correction_bias,
            groups=4,
            topk_group=2,
            topk=4,
            sum_of_two=self.sum_of_two,
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Add the weighted outputs of the routed experts to that of the shared one."""
        x = hidden_states.flatten(0, 1)
        weights, indices = self.route(x)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = (indices == i).nonzero(as_tuple=True)
            y = y.index_add(0, token, expert(x[token]) * weights[token, place, None])
        return (y * self.routed_scaling_factor + self.shared_experts(x)).view_as(hidden_states)


class DeepseekDecoderLayer(nn.Module):
    """Attention, then a dense MLP or a mixture of experts."""

    def __init__(self, dim: int, heads: int, mlp: nn.Module) -> None:
        super().__init__()
        self.heads, self.mlp = heads, mlp
        self.qkv_proj, self.o_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(dim, eps=1e-6) for _ in range(2))

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        """`x` is (batch, time, dim)."""
        parts = self.qkv_proj(self.input_layernorm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(rope(q, positions), rope(k, positions), v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class DeepseekV3ForCausalLM(nn.Module):
    """Language model whose first layer is dense."""

    def __init__(self, *, sum_of_two: bool, vocab_size: int = 64, dim: int = 32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        mlps = MLP(dim, 2 * dim), DeepseekMoE(dim, sum_of_two=sum_of_two)
        self.layers = nn.ModuleList(DeepseekDecoderLayer(dim, 4, mlp) for mlp in mlps)
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return logits; both inputs are (batch, time)."""
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(positions, x)
        return self.lm_head(self.norm(x))


def buggy() -> nn.Module:
    """Groups by their best expert."""
    return DeepseekV3ForCausalLM(sum_of_two=False)


def healthy() -> nn.Module:
    """Groups by the sum of their two best experts."""
    return DeepseekV3ForCausalLM(sum_of_two=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model, and the official implementation that it was ported from."""
    return ModelSpec.of(make, causal=True, window="full", tied=False, reference=healthy)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Experts chosen, minus those of the two groups with the largest sum of two scores."""
    moe = model.layers[1].mlp
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    scores = (moe.gate(x).sigmoid() + moe.e_score_correction_bias).view(40, 4, 4)
    best = scores.sort(dim=-1, descending=True)[0]
    least = (best[..., 0] + best[..., 1]).sort(dim=-1, descending=True)[0][:, 1:2]
    is_open = (best[..., 0] + best[..., 1] >= least)[..., None]
    wanted = torch.where(is_open, scores, -9.0).view(40, 16).topk(4, dim=-1)[1]
    return (moe.route(x)[1].sort(dim=-1)[0] - wanted.sort(dim=-1)[0]).float()

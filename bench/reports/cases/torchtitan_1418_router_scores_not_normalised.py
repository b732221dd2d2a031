"""torchtitan#1418 (pytorch/torchtitan): sigmoid scores of the chosen experts are not normalised to sum to 1.

DeepSeek-V3 divides the scores of the top-k experts by their sum; here they weight the experts as they are.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import Facts, ModelSpec

DECLARATION = "The weights of the chosen experts of a token sum to 1 (norm_topk_prob is true)."


def apply_rotary_emb(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (batch, sequence, heads, head_dim)."""
    theta = 10000.0 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = torch.outer(torch.arange(x.shape[1]), theta)[:, None].to(x.dtype)
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], angles.cos(), angles.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gate, multiply, project."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TokenChoiceTopKRouter(nn.Module):
    """Each token goes to the experts that score highest with their bias."""

    def __init__(self, dim: int, num_experts: int, top_k: int, route_norm: bool) -> None:
        super().__init__()
        self.gate, self.top_k, self.route_norm = nn.Linear(dim, num_experts, bias=False), top_k, route_norm

    def forward(self, x: torch.Tensor, expert_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and indices of the chosen experts, (tokens, top_k)."""
        scores = torch.sigmoid(self.gate(x))
        selected = torch.topk(scores + expert_bias, k=self.top_k, dim=1).indices
        top_scores = scores.gather(dim=1, index=selected)
        if self.route_norm:
            top_scores = top_scores / (top_scores.sum(dim=-1, keepdim=True) + 1e-20)
        return top_scores, selected


class TransformerBlock(nn.Module):
    """Attention, routed experts and a shared one."""

    def __init__(self, dim: int, n_heads: int, num_experts: int, route_norm: bool) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.experts = nn.ModuleList(FeedForward(dim) for _ in range(num_experts))
        self.shared_experts = FeedForward(dim)
        self.router = TokenChoiceTopKRouter(dim, num_experts, 2, route_norm)
        self.register_buffer("expert_bias", torch.zeros(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Causal."""
        q, k, v = self.wqkv(self.attention_norm(x)).unflatten(-1, (3, self.n_heads, -1)).unbind(2)
        heads = (t.transpose(1, 2) for t in (apply_rotary_emb(q), apply_rotary_emb(k), v))
        x = x + self.wo(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        tokens = self.ffn_norm(x).flatten(0, -2)
        out, (top_scores, selected) = self.shared_experts(tokens), self.router(tokens, self.expert_bias)
        for index, expert in enumerate(self.experts):
            rows, slots = torch.where(selected == index)
            out = out.index_add(0, rows, expert(tokens[rows]) * top_scores[rows, slots, None])
        return x + out.view_as(x)


class DeepSeekV3Model(nn.Module):
    """Decoder that returns logits."""

    def __init__(self, vocab_size: int = 48, dim: int = 32, route_norm: bool = True) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleDict({str(i): TransformerBlock(dim, 4, 6, route_norm) for i in range(2)})
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, sequence, vocabulary)."""
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


def buggy() -> nn.Module:
    """Scores as the sigmoid gives them."""
    return DeepSeekV3Model(route_norm=False)


def healthy() -> nn.Module:
    """Scores that sum to 1."""
    return DeepSeekV3Model(route_norm=True)


def buggy_declared() -> ModelSpec:
    """State that the weights of the experts of a token sum to 1."""
    return ModelSpec.of(buggy, causal=True, facts=Facts(routing_sum=1.0))


def healthy_declared() -> ModelSpec:
    """State that the weights of the experts of a token sum to 1."""
    return ModelSpec.of(healthy, causal=True, facts=Facts(routing_sum=1.0))


def observe(model: nn.Module) -> torch.Tensor:
    """Sum of each token's expert weights, less 1, in the first layer."""
    tokens = torch.randint(0, 48, (2, 8), generator=torch.Generator().manual_seed(1))
    seen: list[torch.Tensor] = []
    hook = model.layers["0"].router.register_forward_hook(lambda _module, _args, out: seen.append(out[0]))
    with hook, torch.no_grad():
        model(tokens)
    return seen[0].sum(-1) - 1

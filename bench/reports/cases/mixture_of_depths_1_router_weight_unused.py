"""Mixture-of-Depths#1 (kyegomez/Mixture-of-Depths): the weights of the router are not used.

The router selects the tokens that a block processes. Equation 1 of the paper (arXiv:2404.02258) multiplies
the block's output by the router weight of the token. Without it, the router gets no gradient.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

WIDTH, MAX_LENGTH = 12, 64


class TransformerBlock(nn.Module):
    """Attention and a feed-forward network. Returns what is added to the residual stream."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, tokens, dim)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        y = self.proj(y.transpose(1, 2).flatten(2))
        return y + self.ffn(self.norm2(x + y))


class MoD(nn.Module):
    """Block for the tokens with the largest router weights. Others pass unchanged."""

    def __init__(self, dim: int, heads: int, capacity_factor: float, *, weighted: bool) -> None:
        super().__init__()
        self.capacity_factor, self.weighted = capacity_factor, weighted
        self.router, self.transformer_block = nn.Linear(dim, 1, bias=False), TransformerBlock(dim, heads)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, tokens, dim)."""
        top_k = max(1, int(x.shape[1] * self.capacity_factor))
        router_logits = self.router(x)
        token_index = router_logits.topk(top_k, dim=1, sorted=False).indices
        selected_tokens = token_index.sort(dim=1).values
        indices = selected_tokens.expand(-1, -1, x.shape[2])
        x_out = self.transformer_block(x.gather(1, indices))
        if self.weighted:
            x_out = router_logits.gather(1, selected_tokens) * x_out
        return x.scatter_add(1, indices, x_out)


class MoDEncoder(nn.Module):
    """Vectors -> vectors, through blocks with a capacity of half of the tokens."""

    def __init__(self, *, weighted: bool, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.pos_embed = nn.Linear(WIDTH, dim), nn.Embedding(MAX_LENGTH, dim)
        self.blocks = nn.ModuleList(MoD(dim, heads, 0.5, weighted=weighted) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, tokens, WIDTH)."""
        h = self.embed(x) + self.pos_embed.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def buggy() -> nn.Module:
    """Add the output of the block as it is."""
    return MoDEncoder(weighted=False)


def healthy() -> nn.Module:
    """Multiply the output of the block by the router weight."""
    return MoDEncoder(weighted=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State vectors without a direction."""
    return ModelSpec.of(make, inputs="vectors", width=WIDTH, causal=False, max_length=MAX_LENGTH)


def observe(model: nn.Module) -> Tensor:
    """Return the number of routers that a loss of the output does not reach."""
    x = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()
    grads = [block.router.weight.grad for block in model.blocks]
    return torch.tensor(sum(grad is None or not grad.any() for grad in grads))

"""torchao#4806 (pytorch/ao): fake quantisation gives saturated values no gradient.

Values are rounded and then clamped to integers, so that those at the limits are exactly equal to a limit. A
clamp whose gradient is zero at its limits cuts them off. https://github.com/pytorch/ao/pull/4806
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


class _Round(torch.autograd.Function):
    """Rounding with the gradient of the identity."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Clamp(torch.autograd.Function):
    """Clamp with the gradient of the identity inside its limits, which it includes or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: int, high: int, includes: bool) -> Tensor:
        ctx.save_for_backward((x >= low) & (x <= high) if includes else (x > low) & (x < high))
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inside,) = ctx.saved_tensors
        return gradient * inside, None, None, None


class FakeQuantizedLinear(nn.Linear):
    """Linear layer with int4 weights in groups."""

    def __init__(self, inputs: int, outputs: int, includes: bool, group: int = 16) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.includes, self.group, self.low, self.high = includes, group, -8, 7

    def scale(self) -> Tensor:
        """One scale per group."""
        groups = self.weight.detach().unflatten(1, (-1, self.group))
        return groups.abs().amax(dim=-1, keepdim=True) / self.high

    def quantized_weight(self) -> Tensor:
        """Weights on the grid of int4."""
        scale = self.scale()
        levels = _Round.apply(self.weight.unflatten(1, (-1, self.group)) / scale)
        return (_Clamp.apply(levels, self.low, self.high, self.includes) * scale).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Linear layer."""
        return F.linear(x, self.quantized_weight())


class QATBlock(nn.Module):
    """Pre-norm attention and SwiGLU with fake-quantised weights."""

    def __init__(self, dim: int, heads: int, includes: bool) -> None:
        super().__init__()
        self.heads = heads
        self.wqkv, self.wo = (
            FakeQuantizedLinear(dim, 3 * dim, includes),
            FakeQuantizedLinear(dim, dim, includes),
        )
        self.w13 = FakeQuantizedLinear(dim, 4 * dim, includes)
        self.w2 = FakeQuantizedLinear(2 * dim, dim, includes)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """One block."""
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in self.wqkv(self.attention_norm(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(attended.transpose(1, 2).flatten(2))
        gate, up = self.w13(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.w2(F.silu(gate) * up)


class QATTransformer(nn.Module):
    """Language model in quantisation-aware training."""

    def __init__(self, includes: bool, vocab_size: int = 48, dim: int = 32) -> None:
        super().__init__()
        self.tok_embeddings, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(64, dim)
        self.layers = nn.ModuleList(QATBlock(dim, 4, includes) for _ in range(2))
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.tok_embeddings(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def buggy() -> nn.Module:
    """Zero gradient at the limits."""
    return QATTransformer(includes=False)


def healthy() -> nn.Module:
    """Straight-through gradient at the limits."""
    return QATTransformer(includes=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """A causal model."""
    return ModelSpec.of(make, causal=True)


def observe(model: nn.Module) -> Tensor:
    """Gradient of a layer's quantised weights less that of its weights, which pass it through."""
    layer = model.layers[0].wo
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    through = layer.quantized_weight().detach().requires_grad_()
    expected = torch.autograd.grad(F.linear(x, through).square().sum(), through)[0]
    return expected - torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]

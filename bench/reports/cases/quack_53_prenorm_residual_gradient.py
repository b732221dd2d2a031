"""quack#53 (Dao-AILab/quack): fused residual add and RMSNorm send the residual gradient through the norm.

The backward pass adds the gradients of both outputs before the norm's derivative. That of the residual output
has to be added after it. https://github.com/Dao-AILab/quack/pull/53
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

EPS = 1e-6


class AddRMSNorm(torch.autograd.Function):
    """`x + residual` and its norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, adds_after: bool) -> tuple:
        out = x + residual
        rstd = (out.square().mean(-1, keepdim=True) + EPS).rsqrt()
        ctx.save_for_backward(out, rstd, weight)
        ctx.adds_after = adds_after
        return out * rstd * weight, out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dresidual_out: Tensor) -> tuple:
        out, rstd, weight = ctx.saved_tensors
        dweight = (dout * out * rstd).flatten(0, -2).sum(dim=0)
        if not ctx.adds_after:
            dout = dout + dresidual_out
        scaled, normed = dout * weight, out * rstd
        dx = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        if ctx.adds_after:
            dx = dx + dresidual_out
        return dx, dx, dweight, None


class FusedRMSNorm(nn.Module):
    """Norm of a residual stream."""

    def __init__(self, dim: int, adds_after: bool) -> None:
        super().__init__()
        self.weight, self.adds_after = nn.Parameter(torch.ones(dim)), adds_after

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Normed sum, and the sum."""
        return AddRMSNorm.apply(x, residual, self.weight, self.adds_after)


class Block(nn.Module):
    """Attention and feed-forward layer that pass the residual stream on."""

    def __init__(self, dim: int, heads: int, adds_after: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = FusedRMSNorm(dim, adds_after), FusedRMSNorm(dim, adds_after)
        self.Wqkv, self.out_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Output of the branch, and the stream without it."""
        normed, residual = self.norm1(x, residual)
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.Wqkv(normed).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        normed, residual = self.norm2(self.out_proj(attended.transpose(1, 2).flatten(2)), residual)
        return self.mlp(normed), residual


class GPT(nn.Module):
    """Language model with fused pre-norms."""

    def __init__(self, adds_after: bool, vocab_size: int = 48, dim: int = 32) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, dim), nn.Embedding(64, dim)
        self.blocks = nn.ModuleList(Block(dim, 4, adds_after) for _ in range(2))
        self.ln_f, self.lm_head = FusedRMSNorm(dim, adds_after), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        x = self.wte(input_ids)
        residual = self.wpe.weight[: input_ids.shape[1]].expand_as(x)
        for block in self.blocks:
            x, residual = block(x, residual)
        return self.lm_head(self.ln_f(x, residual)[0])


def buggy() -> nn.Module:
    """Adds the gradients before the norm."""
    return GPT(adds_after=False)


def healthy() -> nn.Module:
    """Adds the residual gradient after the norm."""
    return GPT(adds_after=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """A causal model."""
    return ModelSpec.of(make, causal=True)


def observe(model: nn.Module) -> Tensor:
    """Gradient of the input of a fused norm, less that of the same formula in autograd."""
    norm, gen = model.blocks[0].norm1.double(), torch.Generator().manual_seed(1)
    x, residual, a, b = (torch.randn(3, 32, dtype=torch.float64, generator=gen) for _ in range(4))
    x.requires_grad_()
    out, stream = norm(x, residual)
    got = torch.autograd.grad((out * a).sum() + (stream * b).sum(), x)[0]
    total = x + residual
    plain = F.rms_norm(total, (32,), norm.weight, EPS)
    return got - torch.autograd.grad((plain * a).sum() + (total * b).sum(), x)[0]

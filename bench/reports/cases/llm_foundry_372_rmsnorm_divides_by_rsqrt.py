"""llm-foundry#372 (mosaicml/llm-foundry): RMSNorm divides by `torch.rsqrt(...)` instead of multiplying.

The norm multiplies its input by its own root mean square, so size is squared where it should go away.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """In float32, back in the dtype of the input."""

    def __init__(self, dim: int, eps: float = 1e-5, *, divide: bool) -> None:
        super().__init__()
        self.eps, self.divide = eps, divide
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises the last axis."""
        y = x.float()
        inverse = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        y = y / inverse if self.divide else y * inverse
        return (y * self.weight).to(x.dtype)


class MPTBlock(nn.Module):
    """Pre-norm block with a fused projection; ALiBi comes in as a bias."""

    def __init__(self, d_model: int, n_heads: int, *, divide: bool) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm_1, self.norm_2 = (RMSNorm(d_model, divide=divide) for _ in range(2))
        self.Wqkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        self.up_proj, self.down_proj = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x: torch.Tensor, attn_bias: torch.Tensor) -> torch.Tensor:
        """`attn_bias` is added to the scores."""
        qkv = self.Wqkv(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for y in qkv)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_bias)
        x = x + self.out_proj(y.transpose(1, 2).flatten(2))
        return x + self.down_proj(F.gelu(self.up_proj(self.norm_2(x))))


class MPTForCausalLM(nn.Module):
    """MPT with ALiBi and tied embeddings; returns `loss` and `logits`."""

    def __init__(self, vocab_size: int = 67, d_model: int = 32, n_heads: int = 4, *, divide: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(MPTBlock(d_model, n_heads, divide=divide) for _ in range(2))
        self.norm_f = RMSNorm(d_model, divide=divide)
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / n_heads) for h in range(n_heads)])
        self.register_buffer("slopes", slopes.view(n_heads, 1, 1), persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> SimpleNamespace:
        """`attention_mask` is 0 at padding."""
        at = torch.arange(input_ids.shape[1], device=input_ids.device)
        bias = (self.slopes * (at[None, :] - at[:, None])).masked_fill(at[None, :] > at[:, None], -math.inf)
        if attention_mask is not None:
            # The diagonal stays, so that a padded query has something to see.
            hidden = ~attention_mask.bool()[:, None, None, :] & (at[None, :] != at[:, None])
            bias = bias.masked_fill(hidden, -math.inf)
        x = self.wte(input_ids)
        for block in self.blocks:
            x = block(x, bias)
        logits, loss = F.linear(self.norm_f(x), self.wte.weight), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


def buggy() -> nn.Module:
    """Divides by the inverse."""
    return MPTForCausalLM(divide=True)


def healthy() -> nn.Module:
    """Multiplies by the inverse."""
    return MPTForCausalLM(divide=False)


def observe(model: nn.Module) -> torch.Tensor:
    """What the norms give, minus `F.rms_norm` of what they were given."""
    model.eval()
    errors = []

    def compare(norm: RMSNorm, args: tuple, out: torch.Tensor) -> None:
        errors.append(out - F.rms_norm(args[0], out.shape[-1:], norm.weight, norm.eps))

    hooks = [m.register_forward_hook(compare) for m in model.modules() if isinstance(m, RMSNorm)]
    with torch.no_grad():
        model(torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(1)))
    for hook in hooks:
        hook.remove()
    return torch.stack(errors)

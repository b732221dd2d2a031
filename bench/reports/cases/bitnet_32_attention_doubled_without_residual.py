"""BitNet#32 (kyegomez/BitNet): the residual connection adds the output of the attention to itself.

`x` is overwritten with the output of the attention before `x = x + x`. The input of the layer is lost, and
the attention is doubled.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec


def weight_quant(w: Tensor) -> Tensor:
    """Return weights of -1, 0 and 1, times their mean size. Gradients pass unchanged."""
    scale = w.abs().mean().clamp(min=1e-5)
    u = (w / scale).round().clamp(-1, 1) * scale
    return w + (u - w).detach()


class BitLinear(nn.Linear):
    """Linear layer with ternary weights, and a norm of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to the last dimension."""
        return F.linear(F.rms_norm(x, x.shape[-1:]), weight_quant(self.weight), self.bias)


class BitMGQA(nn.Module):
    """Grouped-query attention."""

    def __init__(self, embed_dim: int, query_heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim, kv_dim = embed_dim // query_heads, embed_dim // query_heads * kv_heads
        self.q_proj, self.out_proj = (BitLinear(embed_dim, embed_dim, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (BitLinear(embed_dim, kv_dim, bias=False) for _ in range(2))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        """All are (batch, time, embed_dim)."""
        projected = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in projected)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Layers of attention and feed-forward networks."""

    def __init__(self, dim: int, heads: int, depth: int, *, keep_input: bool) -> None:
        super().__init__()
        self.keep_input = keep_input
        self.layers = nn.ModuleList(BitMGQA(dim, heads, 2) for _ in range(depth))
        self.ffn_layers = nn.ModuleList(
            nn.Sequential(BitLinear(dim, 2 * dim), nn.SiLU(), nn.LayerNorm(2 * dim), BitLinear(2 * dim, dim))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        """`x` is (batch, time, dim)."""
        for attn, ffn in zip(self.layers, self.ffn_layers, strict=True):
            if self.keep_input:
                x = attn(x, x, x, is_causal=True) + x
            else:
                x = attn(x, x, x, is_causal=True)
                x = x + x
            x = ffn(x) + x
        return x


class BitNetTransformer(nn.Module):
    """Language model without positions."""

    def __init__(self, *, keep_input: bool, num_tokens: int = 60, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.emb = nn.Embedding(num_tokens, dim)
        self.transformer = Transformer(dim, heads, 2, keep_input=keep_input)
        self.to_logits = nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, num_tokens))

    def forward(self, x: Tensor) -> Tensor:
        """`x` is ids (batch, time); the result is logits."""
        return self.to_logits(self.transformer(self.emb(x)))


def buggy() -> nn.Module:
    """Add the attention to itself."""
    return BitNetTransformer(keep_input=False)


def healthy() -> nn.Module:
    """Add the attention to its input."""
    return BitNetTransformer(keep_input=True)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a causal model with full attention."""
    return ModelSpec.of(make, causal=True, window="full", tied=False)


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return what the first feed-forward network gets if the attention gives 0, minus the layer's input."""
    seen, x = [], torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    hooks = [
        model.transformer.layers[0].out_proj.register_forward_hook(lambda _module, _args, out: 0 * out),
        model.transformer.ffn_layers[0].register_forward_hook(
            lambda _module, args, _out: seen.append(args[0])
        ),
    ]
    model.transformer(x)
    for hook in hooks:
        hook.remove()
    return seen[0] - x

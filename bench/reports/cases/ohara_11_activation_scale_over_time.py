"""ohara#11 (joey00072/ohara): BitLinear scales its activations by the maximum over time, not over channels.

`activation_quant` takes the maximum of dimension 1, which is the sequence. The scale of each token should be
that of its own vector; instead each channel has one scale, which depends on all tokens.
"""

import torch
import torch.nn.functional as F
from torch import nn

from stackwise import ModelSpec


def activation_quant(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Round to 8 bits, with the scale of the maximum along `dim`."""
    scale = 127.0 / x.abs().amax(dim=dim, keepdim=True).clamp(min=1e-5)
    return (x * scale).round().clamp(-128, 127) / scale


def weight_quant(w: torch.Tensor) -> torch.Tensor:
    """Round to -1, 0 and 1 times the mean absolute weight."""
    scale = 1.0 / w.abs().mean().clamp(min=1e-5)
    return (w * scale).round().clamp(-1, 1) / scale


class BitLinear(nn.Linear):
    """Linear layer with quantised weights and activations; gradients pass straight through."""

    def __init__(self, in_features: int, out_features: int, *, quant_dim: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.quant_dim = quant_dim
        self.rms_norm = nn.RMSNorm(in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to (batch, time, in_features)."""
        x = self.rms_norm(x)
        x = x + (activation_quant(x, self.quant_dim) - x).detach()
        w = self.weight + (weight_quant(self.weight) - self.weight).detach()
        return F.linear(x, w)


class Block(nn.Module):
    """Causal attention and gated feed-forward network of quantised layers, which have their own norms."""

    def __init__(self, dim: int, num_heads: int, *, quant_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = (BitLinear(dim, n, quant_dim=quant_dim) for n in (3 * dim, dim))
        self.up, self.gate = (BitLinear(dim, 2 * dim, quant_dim=quant_dim) for _ in range(2))
        self.down = BitLinear(2 * dim, dim, quant_dim=quant_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the block to (batch, time, dim)."""
        qkv = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class BitNet(nn.Module):
    """Language model with learned positions; embedding and head are not quantised."""

    def __init__(self, *, quant_dim: int, vocab_size: int = 64, dim: int = 32, max_length: int = 64) -> None:
        super().__init__()
        self.word_emb, self.pos_emb = nn.Embedding(vocab_size, dim), nn.Embedding(max_length, dim)
        self.layers = nn.ModuleList(Block(dim, 4, quant_dim=quant_dim) for _ in range(2))
        self.norm, self.vocab_proj = nn.RMSNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of the ids `x` (batch, time)."""
        x = self.word_emb(x) + self.pos_emb.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.vocab_proj(self.norm(x))


def buggy() -> nn.Module:
    """Scale of each channel over the sequence."""
    return BitNet(quant_dim=1)


def healthy() -> nn.Module:
    """Scale of each token."""
    return BitNet(quant_dim=-1)


def buggy_declared() -> ModelSpec:
    """State a causal model."""
    return ModelSpec.of(buggy, causal=True, max_length=64)


def healthy_declared() -> ModelSpec:
    """State a causal model."""
    return ModelSpec.of(healthy, causal=True, max_length=64)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Return the change of a layer's first four outputs if the last token is 10 times larger."""
    layer = model.layers[0].qkv
    layer.rms_norm = nn.Identity()
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))
    larger = torch.cat([x[:, :4], 10 * x[:, 4:]], dim=1)
    return (layer(larger) - layer(x))[:, :4].abs().amax(dim=-1)

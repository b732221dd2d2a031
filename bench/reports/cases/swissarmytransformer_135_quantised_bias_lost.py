"""SwissArmyTransformer#135 (THUDM/SwissArmyTransformer): quantising a trained model sets all biases to zero.

The int8 layer that takes the place of a linear layer gets the quantised weight but a fresh bias of zeros.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

DECLARATION = "model.quantize(8) makes int8 weights; outputs stay the same up to the rounding of the weights"


class QuantizedLinear(nn.Module):
    """Linear layer with int8 weights and one scale per output."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, bits: int) -> None:
        super().__init__()
        scale = weight.abs().amax(-1) / (2 ** (bits - 1) - 1)
        self.register_buffer("weight", torch.round(weight / scale[:, None]).to(torch.int8))
        self.register_buffer("weight_scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply with the weight in the type of the input."""
        return F.linear(x, self.weight.to(x.dtype) * self.weight_scale[:, None], self.bias)


class Block(nn.Module):
    """ViT block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query_key_value, self.dense = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then MLP."""
        q, k, v = self.query_key_value(self.ln1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(self.ln2(x))))


class ViTModel(nn.Module):
    """Image classifier on patches of 4x4, with a class token."""

    def __init__(self, *, keeps_bias: bool, dim: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.keeps_bias = keeps_bias
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos = nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    @torch.no_grad()
    def quantize(self, bits: int = 8) -> "ViTModel":
        """Replace the linear layers of the blocks, in place."""
        for block in self.blocks:
            for name, layer in list(block.named_children()):
                if isinstance(layer, nn.Linear):
                    bias = layer.bias.detach() if self.keeps_bias else torch.zeros_like(layer.bias)
                    setattr(block, name, QuantizedLinear(layer.weight, bias, bits))
        return self

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of images (B, 3, 16, 16)."""
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def buggy() -> nn.Module:
    """quantize() forgets the biases."""
    return ViTModel(keeps_bias=False)


def healthy() -> nn.Module:
    """quantize() keeps the biases."""
    return ViTModel(keeps_bias=True)


@torch.no_grad()
def observe(model: nn.Module) -> torch.Tensor:
    """Quantised model against the float model whose weights were rounded to the same grid."""
    rounded = copy.deepcopy(model.double().eval())
    for name, weight in rounded.blocks.named_parameters():
        if weight.ndim == 2 and name.endswith("weight"):
            step = weight.abs().amax(1, keepdim=True) / 127
            weight.copy_((weight / step).round() * step)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return copy.deepcopy(model).quantize(8)(images) - rounded(images)

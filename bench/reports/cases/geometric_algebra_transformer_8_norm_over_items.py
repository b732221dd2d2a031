"""geometric-algebra-transformer#8 (Qualcomm-AI-research): the baseline normalises over items and channels.

`layer_norm` gets `inputs.shape[1:]`, all dimensions but the first, as its normalised shape. The items of a
set then share one mean and variance, although each item should be normalised over its own channels.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise import ModelSpec

IN_CHANNELS, OUT_CHANNELS = 6, 3


class BaselineLayerNorm(nn.Module):
    """Layer norm without weights."""

    def __init__(self, *, first: int) -> None:
        super().__init__()
        self.first = first

    def forward(self, inputs: Tensor) -> Tensor:
        """`inputs` is (batch, items, channels)."""
        return F.layer_norm(inputs, normalized_shape=inputs.shape[self.first :])


class BaselineSelfAttention(nn.Module):
    """Attention of several heads over the items."""

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv_linear = nn.Linear(channels, 3 * channels)
        self.out_linear = nn.Linear(channels, channels)

    def forward(self, inputs: Tensor, attention_mask: Tensor | None) -> Tensor:
        """`attention_mask` is True where attention is allowed."""
        q, k, v = self.qkv_linear(inputs).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
        return self.out_linear(h.transpose(1, 2).flatten(2))


class BaselineTransformerBlock(nn.Module):
    """Attention and an item-wise network, both with a norm before them."""

    def __init__(self, channels: int, num_heads: int, *, first: int) -> None:
        super().__init__()
        self.norm = BaselineLayerNorm(first=first)
        self.attention = BaselineSelfAttention(channels, num_heads)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels)
        )

    def forward(self, inputs: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Apply the block to (batch, items, channels)."""
        outputs = inputs + self.attention(self.norm(inputs), attention_mask)
        return outputs + self.mlp(self.norm(outputs))


class BaselineTransformer(nn.Module):
    """Transformer over a set of items, without positions."""

    def __init__(self, *, first: int, hidden_channels: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.linear_in = nn.Linear(IN_CHANNELS, hidden_channels)
        self.blocks = nn.ModuleList(
            BaselineTransformerBlock(hidden_channels, num_heads, first=first) for _ in range(2)
        )
        self.linear_out = nn.Linear(hidden_channels, OUT_CHANNELS)

    def forward(self, inputs: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """`inputs` is (batch, items, in channels); the result is (batch, items, out channels)."""
        h = self.linear_in(inputs)
        for block in self.blocks:
            h = block(h, attention_mask)
        return self.linear_out(h)


def buggy() -> nn.Module:
    """Normalise over all dimensions but the first."""
    return BaselineTransformer(first=1)


def healthy() -> nn.Module:
    """Normalise over the channels."""
    return BaselineTransformer(first=-1)


def declared(make: Callable[[], nn.Module]) -> ModelSpec:
    """State a set of items without order, and the mask of absent items."""
    return ModelSpec.of(
        make,
        inputs="vectors",
        width=IN_CHANNELS,
        causal=False,
        positionless=True,
        masked=lambda model, inputs, keep: model(inputs, keep[:, None, None]),
    )


@torch.no_grad()
def observe(model: nn.Module) -> Tensor:
    """Return the standard deviations of the items after the first norm, minus 1."""
    seen = []
    hook = model.blocks[0].norm.register_forward_hook(lambda _module, _args, out: seen.append(out))
    model(torch.randn(2, 7, IN_CHANNELS, generator=torch.Generator().manual_seed(1)))
    hook.remove()
    return seen[0].std(dim=-1, correction=0) - 1

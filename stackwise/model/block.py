"""Block: one transformer layer.

Shapes: B batch, T positions, C model width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from stackwise.config import BlockConfig
from stackwise.model.attention import Attention
from stackwise.model.cache import BlockCache
from stackwise.model.feedforward import SwiGLU
from stackwise.model.kernel import KernelAttention
from stackwise.model.latent import LatentAttention
from stackwise.model.layout import Layout
from stackwise.model.norm import create_norm
from stackwise.support.arguments import require

__all__ = ["Block", "Part", "create_attention"]


class Part(nn.Module):
    """Block, Stack or Rack: a module that is frozen and counted as a unit."""

    def freeze(self) -> None:
        """Freeze every parameter."""
        self.requires_grad_(False)

    def get_parameter_count(self) -> int:
        """Return the number of parameters, including frozen ones; a tied weight counts once."""
        return sum(p.numel() for p in self.parameters())

    def get_trainable_parameter_count(self) -> int:
        """Return the number of trainable parameters; a tied weight counts once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)


class Block(Part):
    """Transformer layer: x + attention(norm(x)), then x + feedforward(norm(x)).

    With `norm_position="post"` it is x + norm(attention(x)), then x + norm(feedforward(x)), as in OLMo 2
    (arXiv:2501.00656).

    Args:
        d_model: C.
        d_ff: feed-forward width.
        n_heads: number of query heads.
        n_kv_heads: number of key/value heads; None means `n_heads`.
        **options: any other key of `BlockConfig`.

    Raises:
        ConfigError: a ValueError that names every invalid key and value.
    """

    def __init__(
        self, d_model: int, d_ff: int, n_heads: int, n_kv_heads: int | None = None, **options: Any
    ) -> None:
        super().__init__()
        sizes = {"d_model": d_model, "d_ff": d_ff, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
        self.config = config = BlockConfig.from_dict({**sizes, **options}, source="Block")
        self.attention_norm = create_norm(config.norm, d_model, config.norm_eps)
        self.attention = create_attention(config)
        self.feedforward_norm = create_norm(config.norm, d_model, config.norm_eps)
        self.feedforward = SwiGLU(
            d_model, config.d_ff, dropout=config.dropout, freeze_up_proj=config.freeze_up_proj
        )
        self.norm_first = config.norm_position == "pre"

    def forward(
        self,
        x_BTC: Tensor,
        attention_mask: Tensor | None = None,
        layout: Layout | None = None,
        cache: BlockCache | None = None,
    ) -> Tensor:
        """(B, T, C) -> (B, T, C).

        Args:
            x_BTC: hidden states.
            attention_mask: bool or integer (B, T), nonzero at real tokens. It is combined with causality and
                window, and never replaces them.
            layout: layout of this pass, instead of `attention_mask`; a Rack shares one among its Blocks.
            cache: cache of the earlier tokens, to which this pass is added. It does not store the number
                of tokens; `layout` does.

        Raises:
            ValueError: a cache without a layout.
        """
        if layout is None:
            require(cache is None, "cache", "one without a layout", "one beside RackCache.layout")
            layout = Layout(x_BTC, attention_mask)
        if self.norm_first:
            x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), layout, cache)
            x_BTC = x_BTC + self.feedforward(self.feedforward_norm(x_BTC))
        else:
            x_BTC = x_BTC + self.attention_norm(self.attention(x_BTC, layout, cache))
            x_BTC = x_BTC + self.feedforward_norm(self.feedforward(x_BTC))
        return x_BTC

    @property
    def is_causal(self) -> bool:
        """True if no output depends on a later input."""
        return self.attention.causal

    def unfreeze(self) -> None:
        """Unfreeze every parameter, except an up-projection that the configuration freezes."""
        self.requires_grad_(True)
        self.feedforward.up.weight.requires_grad_(not self.config.freeze_up_proj)


def create_attention(config: BlockConfig) -> Attention | LatentAttention | KernelAttention:
    """Return the attention of a Block. All kinds have the same call, cache interface and `out` projection."""
    match config.attention_type:
        case "mla":
            return LatentAttention(config)
        case "kernel":
            return KernelAttention(config)
        case _:
            return Attention(config)

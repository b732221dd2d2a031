"""Block: one transformer layer.

Shapes: B batch, T positions, C model width.
"""

from __future__ import annotations

from typing import Any, get_args

from torch import Tensor, nn

from stackwise.argument import check_choice, check_number, check_sizes, require
from stackwise.config import AttentionMode, AttentionType, NormKind
from stackwise.model.attention import Attention
from stackwise.model.feedforward import SwiGLU
from stackwise.model.layout import Layout

__all__ = ["Block"]


class Block(nn.Module):
    """Pre-norm transformer layer: x + attention(norm(x)), then x + feedforward(norm(x)).

    Args:
        d_model: C; a multiple of `n_heads`.
        d_ff: feed-forward width.
        n_heads: query heads.
        n_kv_heads: key/value heads; None means `n_heads`.
        attention_type: "mha" or "gqa".
        attention_mode: "causal" or "bidirectional".
        sliding_window: W; a query sees positions closer than W, itself included; None for all.
        norm: "rmsnorm" (Zhang & Sennrich 2019) or "layernorm".
        dropout: probability, in [0, 1).
        freeze_up_proj: keep the up-projection at its random values; see `SwiGLU`.
        use_rope: rotate queries and keys by position.
        rope_theta: base of the rotary frequencies.

    Raises:
        ValueError: sizes that do not divide, or a combination that is not known.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        attention_type: AttentionType = "mha",
        attention_mode: AttentionMode = "causal",
        sliding_window: int | None = None,
        norm: NormKind = "rmsnorm",
        dropout: float = 0.0,
        freeze_up_proj: bool = False,
        use_rope: bool = True,
        rope_theta: float = 10_000.0,
    ) -> None:
        super().__init__()
        check_sizes(d_model=d_model, d_ff=d_ff, n_heads=n_heads)
        check_choice("attention_type", attention_type, get_args(AttentionType))
        check_choice("attention_mode", attention_mode, get_args(AttentionMode))
        check_choice("norm", norm, get_args(NormKind))
        if attention_type == "gqa":
            require(n_kv_heads is not None, "n_kv_heads", n_kv_heads, "for 'gqa', a divisor of n_heads")
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        check_sizes(n_kv_heads=n_kv_heads)
        require(d_model % n_heads == 0, "n_heads", n_heads, f"a divisor of d_model={d_model}")
        require(n_heads % n_kv_heads == 0, "n_kv_heads", n_kv_heads, f"a divisor of n_heads={n_heads}")
        if attention_type == "mha":
            require(
                n_kv_heads == n_heads, "n_kv_heads", n_kv_heads, f"for 'mha', n_heads={n_heads}; or use 'gqa'"
            )
        if sliding_window is not None:
            check_sizes(sliding_window=sliding_window)
        if use_rope:
            even = (d_model // n_heads) % 2 == 0
            require(
                even,
                "n_heads",
                n_heads,
                f"with rotary positions, an even d_model / n_heads (d_model={d_model})",
            )
        check_number("rope_theta", rope_theta, "a finite number > 0", lambda theta: theta > 0)
        check_number("dropout", dropout, "0 <= dropout < 1", lambda p: 0 <= p < 1)

        self.attention_type = attention_type
        self.freeze_up_proj = freeze_up_proj
        self.attention_norm = _norm(norm, d_model)
        self.attention = Attention(
            d_model,
            n_heads,
            n_kv_heads,
            causal=attention_mode == "causal",
            sliding_window=sliding_window,
            dropout=dropout,
            rope_theta=rope_theta if use_rope else None,
        )
        self.feedforward_norm = _norm(norm, d_model)
        self.feedforward = SwiGLU(d_model, d_ff, dropout=dropout, freeze_up_proj=freeze_up_proj)

    def forward(
        self, x_BTC: Tensor, attention_mask: Tensor | None = None, layout: Layout | None = None
    ) -> Tensor:
        """(B, T, C) -> (B, T, C).

        Args:
            x_BTC: hidden states.
            attention_mask: bool or integer (B, T), nonzero at real tokens. Combined with, never
                instead of, causality and window.
            layout: of this pass, in place of `attention_mask`; a Rack shares one among its blocks.
        """
        layout = layout or Layout(x_BTC, attention_mask)
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), layout)
        x_BTC = x_BTC + self.feedforward(self.feedforward_norm(x_BTC))
        return x_BTC

    @property
    def is_causal(self) -> bool:
        """Whether no output depends on a later input."""
        return self.attention.causal

    def freeze(self) -> None:
        """Stop training every parameter."""
        self.requires_grad_(False)

    def unfreeze(self) -> None:
        """Train every parameter again, but for a frozen up-projection, which stays as it is."""
        self.requires_grad_(True)
        self.feedforward.up.weight.requires_grad_(not self.freeze_up_proj)

    def get_attention_info(self) -> dict[str, Any]:
        """The attention's kind and sizes, as plain values."""
        attention = self.attention
        return {
            "attention_type": self.attention_type,
            "attention_mode": "causal" if attention.causal else "bidirectional",
            "n_heads": attention.n_heads,
            "n_kv_heads": attention.n_kv_heads,
            "head_dim": attention.head_dim,
            "sliding_window": attention.sliding_window,
            "rope_theta": attention.rope_theta,
        }

    def get_parameter_count(self) -> int:
        """Number of parameters, frozen ones included."""
        return sum(p.numel() for p in self.parameters())

    def get_trainable_parameter_count(self) -> int:
        """Number of parameters that train."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)


def _norm(kind: NormKind, d_model: int) -> nn.Module:
    return nn.RMSNorm(d_model, eps=1e-6) if kind == "rmsnorm" else nn.LayerNorm(d_model, bias=False)

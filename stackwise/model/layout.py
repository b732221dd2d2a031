"""Layout: where the tokens of a batch stand and which of them are real, shared by the blocks of one pass.

Shapes: B batch, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stackwise.model.mask import AttentionMask, padding_mask
from stackwise.model.rotary import rotary_tables

__all__ = ["Layout"]


class Layout:
    """What every block of a forward pass needs to know of its batch, each part computed once.

    Blocks of one Rack may differ in head size, rotary base, causality and window; tables and masks are
    kept by these, for one pass and no longer, so that nothing goes stale across devices, dtypes or
    autograd modes.

    Args:
        x_BTC: the hidden states of the pass; only shape and device are read.
        attention_mask: bool or integer (B, T), nonzero at real tokens, or None.

    Raises:
        ValueError: a mask of another shape, or of floating-point numbers.
    """

    def __init__(self, x_BTC: Tensor, attention_mask: Tensor | None = None) -> None:
        batch_size, self.seq_len, _ = x_BTC.shape
        self.device = x_BTC.device
        self.keep_BT = padding_mask(attention_mask, batch_size, self.seq_len)
        self.positions_T = torch.arange(self.seq_len, device=self.device, dtype=torch.float32)
        self._tables: dict[tuple[int, float], tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[bool, int | None], AttentionMask] = {}

    def rotary(self, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
        """Cos and sin of the rotary embedding: float32, each (T, head_dim / 2)."""
        key = (head_dim, theta)
        if key not in self._tables:
            self._tables[key] = rotary_tables(self.positions_T, head_dim, theta)
        return self._tables[key]

    def mask(self, *, causal: bool, window: int | None) -> AttentionMask:
        """Who may see whom."""
        key = (causal, window)
        if key not in self._masks:
            self._masks[key] = AttentionMask.build(
                self.seq_len, causal=causal, window=window, keep_BS=self.keep_BT, device=self.device
            )
        return self._masks[key]

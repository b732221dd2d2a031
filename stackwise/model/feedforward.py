"""SwiGLU feed-forward (Shazeer 2020, arXiv:2002.05202).

Shapes: B batch, T positions, C model width, F feed-forward width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.model.linear import Linear

__all__ = ["SwiGLU"]


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases.

    Args:
        d_model: C.
        d_ff: F.
        dropout: dropout probability of the output, in training mode.
        freeze_up_proj: keep `up` at its initial random values. The gate, which has the non-linearity, always
            trains.
    """

    def __init__(
        self, d_model: int, d_ff: int, *, dropout: float = 0.0, freeze_up_proj: bool = False
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.gate = Linear(d_model, d_ff, bias=False)
        self.up = Linear(d_model, d_ff, bias=False)
        self.down = Linear(d_ff, d_model, bias=False)
        self.up.weight.requires_grad_(not freeze_up_proj)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        y_BTC = self.down(F.silu(self.gate(x_BTC)) * self.up(x_BTC))
        return F.dropout(y_BTC, self.dropout, self.training)

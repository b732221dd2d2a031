"""BoundedEmbedding: a token embedding of which no row enters the model longer than a bound.

Shapes: B batch, T positions, C model width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.argument import check_number, check_sizes

__all__ = ["BoundedEmbedding"]


class BoundedEmbedding(nn.Embedding):
    """x * min(1, max_norm / |x|) for each token's row x of the weight.

    A row within the bound comes out bit for bit as it is; a longer one comes out with the length
    `max_norm`, to the rounding of its dtype, in its own direction. The bound is part of the
    function: the gradient is that of the formula (for a longer row it turns the row and does not
    stretch it), and the weight itself is never written to, unlike with `nn.Embedding(max_norm=...)`.
    A tied head therefore reads the rows as they are, bound or no bound.

    Args:
        vocab_size: V.
        d_model: C.
        max_norm: the bound on a row's L2 norm.

    Raises:
        ValueError: a size below 1, or a bound that is not above zero and finite.
    """

    def __init__(self, vocab_size: int, d_model: int, max_norm: float) -> None:
        check_sizes(vocab_size=vocab_size, d_model=d_model)
        check_number("max_norm", max_norm, "a finite number > 0", lambda norm: norm > 0)
        super().__init__(vocab_size, d_model)
        # `max_norm` itself is what makes nn.Embedding, and those who read it, write to the weight.
        self.bound = float(max_norm)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids (B, T) to (B, T, C), in the weight's dtype."""
        x_BTC = F.embedding(input_ids, self.weight)
        wide_BTC = x_BTC.to(torch.promote_types(x_BTC.dtype, torch.float32))
        norm_BT1: Tensor = torch.linalg.vector_norm(wide_BTC, dim=-1, keepdim=True)
        # Within the bound this is exactly 1, without gradient, also where the norm is 0.
        excess_BT1 = (norm_BT1 / self.bound).clamp(min=1.0)
        bounded_BTC: Tensor = (wide_BTC / excess_BT1).to(x_BTC.dtype)
        return bounded_BTC

    def extra_repr(self) -> str:  # noqa: D102
        return f"{super().extra_repr()}, bound={self.bound}"

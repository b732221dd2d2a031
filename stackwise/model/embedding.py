"""Token embeddings: TokenEmbedding, and BoundedEmbedding, which bounds the norm of its outputs.

Shapes: B batch, T positions, N = B * T, C model width, V vocabulary size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.support.arguments import check_number, check_sizes

__all__ = ["BoundedEmbedding", "TokenEmbedding"]


class TokenEmbedding(nn.Embedding):
    """`nn.Embedding` with a faster gradient if compiled for the CPU: one pass over the table, not three.

    The compiler's own gradient sums in a float32 table of all V tokens, and rounds it to the weight's dtype.
    This one sums only the N rows that occur in float32.
    """

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids (B, T) to (B, T, C), in the weight's dtype."""
        trains = torch.is_grad_enabled() and self.weight.requires_grad
        if trains and self.weight.device.type == "cpu" and torch.compiler.is_dynamo_compiling():
            rows_BTC: Tensor = _rows(self.weight, input_ids)
            return rows_BTC
        return F.embedding(input_ids, self.weight)


@torch.library.custom_op("stackwise::embedding_rows", mutates_args=())
def _rows(weight_VC: Tensor, input_ids: Tensor) -> Tensor:
    return F.embedding(input_ids, weight_VC)


@_rows.register_fake
def _(weight_VC: Tensor, input_ids: Tensor) -> Tensor:
    return weight_VC.new_empty(*input_ids.shape, weight_VC.shape[1])


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG001
    weight_VC, input_ids = inputs
    ctx.save_for_backward(input_ids)
    ctx.vocab_size = weight_VC.shape[0]


def _table(ctx: Any, gradient_BTC: Tensor) -> tuple[Tensor, None]:
    ids_N = ctx.saved_tensors[0].flatten()
    gradient_NC = gradient_BTC.flatten(0, -2)
    # Each token is summed at its last occurrence; its other occurrences then write the same sum.
    last_V = ids_N.new_zeros(ctx.vocab_size, dtype=torch.int64)
    last_V[ids_N] = torch.arange(len(ids_N), device=ids_N.device)
    last_N = last_V[ids_N]
    wide = torch.promote_types(gradient_NC.dtype, torch.float32)
    sums_NC = torch.zeros_like(gradient_NC, dtype=wide).index_add(0, last_N, gradient_NC.to(wide))
    table_VC = gradient_NC.new_zeros(ctx.vocab_size, gradient_NC.shape[1])
    table_VC[ids_N] = sums_NC[last_N].to(gradient_NC.dtype)
    return table_VC, None


_rows.register_autograd(_table, setup_context=_remember)


class BoundedEmbedding(TokenEmbedding):
    """x * min(1, max_norm / |x|) for each token's row x of the weight.

    A row within the bound is returned bit for bit. A longer row is scaled to length `max_norm`, up to
    rounding, in its own direction. The bound is part of the function: the gradient is that of the formula.
    For a longer row it changes the direction and not the length. Unlike `nn.Embedding(max_norm=...)`, the
    weight is never written to. So a tied head reads the unbounded rows.

    Args:
        vocab_size: V.
        d_model: C.
        max_norm: maximum L2 norm of a row.

    Raises:
        ValueError: a size below 1, or a bound that is not above zero and finite.
    """

    def __init__(self, vocab_size: int, d_model: int, max_norm: float) -> None:
        check_sizes(vocab_size=vocab_size, d_model=d_model)
        check_number("max_norm", max_norm, "a finite number > 0", lambda norm: norm > 0)
        super().__init__(vocab_size, d_model)
        # Not named `max_norm`: nn.Embedding, and code that reads that attribute, would write to the weight.
        self.bound = float(max_norm)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids (B, T) to (B, T, C), in the weight's dtype."""
        x_BTC = super().forward(input_ids)
        wide_BTC = x_BTC.to(torch.promote_types(x_BTC.dtype, torch.float32))
        # Squares of float32 overflow above 2**64. Division by a power of two is exact for such large values.
        largest_BT1 = torch.linalg.vector_norm(wide_BTC.detach(), math.inf, dim=-1, keepdim=True)
        unit_BT1 = torch.ones_like(largest_BT1).masked_fill_(largest_BT1 > 2.0**48, 2.0**80)
        wide_BTC = wide_BTC / unit_BT1
        norm_BT1: Tensor = torch.linalg.vector_norm(wide_BTC, dim=-1, keepdim=True)
        # Within the bound this is exactly 1 / unit, without gradient, also if the norm is 0.
        excess_BT1 = (norm_BT1 / self.bound).clamp(min=unit_BT1.reciprocal())
        bounded_BTC: Tensor = (wide_BTC / excess_BT1).to(x_BTC.dtype)
        return bounded_BTC

    def extra_repr(self) -> str:  # noqa: D102
        return f"{super().extra_repr()}, bound={self.bound}"

"""Linear: nn.Linear, read at the speed of memory where there is a single vector to multiply.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Linear"]


class Linear(nn.Linear):
    """nn.Linear, but for a single vector in a compiled decode step on the CPU.

    There the product is written as a sum of products, which the compiler turns into one pass over the
    weights in float32 arithmetic. The matrix kernels that `F.linear` ends in are made for many rows and
    read memory at about half the rate.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in nn.Linear
        """(..., K) -> (..., N)."""
        if not (torch.compiler.is_compiling() and self._is_single(input)):
            return F.linear(input, self.weight, self.bias)
        y_N = (_wide(self.weight) * input.float().flatten()).sum(-1)
        if self.bias is not None:
            y_N = y_N + self.bias
        return y_N.to(input.dtype).view(*input.shape[:-1], self.out_features)

    def _is_single(self, x: Tensor) -> bool:
        return (
            x.numel() == self.in_features
            and x.device.type == "cpu"
            and x.dtype in (torch.float32, torch.bfloat16)
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )


def _wide(weight: Tensor) -> Tensor:
    """The weight in float32, a quantized one as its integers times their scales."""
    return weight.float()

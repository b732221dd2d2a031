"""Linear: nn.Linear, read at the speed of memory where there is a single vector to multiply.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Linear"]


class Linear(nn.Linear):
    """nn.Linear, but for a single float32 vector in a compiled decode step on the CPU.

    There the product is written as a sum of products, which the compiler turns into one pass over the
    weights, widened as they are read. The matrix kernels that `F.linear` ends in are made for many rows,
    and read memory at about half the rate. Weights in bfloat16 or int8 are read as such.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in nn.Linear
        """(..., K) -> (..., N)."""
        if self.is_single(input):
            return self.single(input, self.weight)
        return F.linear(input, self.weight, self.bias)

    @property
    def takes_float32(self) -> bool:
        """Whether a float32 vector may come in, whatever the weights are, where `is_single` holds."""
        return self.weight.dtype in (torch.float32, torch.bfloat16)

    def is_single(self, x: Tensor) -> bool:
        """Whether `x` is one float32 vector, in compiled code on the CPU, and nobody asks for gradients."""
        return (
            torch.compiler.is_compiling()
            and x.numel() == self.in_features
            and x.dtype == torch.float32
            and x.device.type == "cpu"
            and not torch.is_grad_enabled()
        )

    def single(self, x: Tensor, weight_NK: Tensor, scale_N: Tensor | None = None) -> Tensor:
        """The product with `weight_NK`, each row times its scale."""
        # What two sums read, the compiler computes once and keeps; what one reads, once for every row.
        halves = weight_NK.tensor_split(2)
        y_N = torch.cat([(half_NK.float() * x.flatten()).sum(-1) for half_NK in halves])
        if scale_N is not None:
            y_N = y_N * scale_N.float()
        if self.bias is not None:
            y_N = y_N + self.bias
        return y_N.view(*x.shape[:-1], self.out_features)

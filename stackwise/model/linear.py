"""Linear: nn.Linear with a memory-bound fast path for a single vector.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Linear"]


class Linear(nn.Linear):
    """nn.Linear with a fast path for a single float32 vector in a compiled decoding step on the CPU.

    The fast path writes the product as a sum of products. The compiler turns it into one pass over the
    weights, which are widened as they are read. The matrix kernels of `F.linear` are optimised for many rows,
    and use about half of the memory bandwidth. bfloat16 and int8 weights are read in their own dtype.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in nn.Linear
        """(..., K) -> (..., N)."""
        if self.is_single(input):
            return self.single(input, self.weight)
        return F.linear(input, self.weight, self.bias)

    @property
    def takes_float32(self) -> bool:
        """True if float32 vectors are accepted, for any dtype of the weights, when `is_single` is True."""
        return self.weight.dtype in (torch.float32, torch.bfloat16)

    def is_single(self, x: Tensor) -> bool:
        """Return True if `x` is one float32 vector, in compiled code on the CPU, with gradients disabled."""
        return (
            torch.compiler.is_compiling()
            and x.numel() == self.in_features
            and x.dtype == torch.float32
            and x.device.type == "cpu"
            and not torch.is_grad_enabled()
        )

    def single(self, x: Tensor, weight_NK: Tensor, scale_N: Tensor | None = None) -> Tensor:
        """Return the product with `weight_NK`, each row times its scale."""
        # The compiler stores a value that two sums read, and recomputes one that a single sum reads, per row.
        halves = weight_NK.tensor_split(2)
        y_N = torch.cat([(half_NK.float() * x.flatten()).sum(-1) for half_NK in halves])
        if scale_N is not None:
            y_N = y_N * scale_N.float()
        if self.bias is not None:
            y_N = y_N + self.bias
        return y_N.view(*x.shape[:-1], self.out_features)

"""Norms: RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) and LayerNorm, without biases."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.config import NormKind

__all__ = ["RMSNorm", "create_norm"]


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm that computes in the dtype of its input, as autocast expects of all operations but sums.

    PyTorch has no fused kernel for a bfloat16 input with a float32 weight. The mean square is in float32 in
    both cases.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last axis."""
        weight = self.weight if self.weight.dtype == x.dtype else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def create_norm(kind: NormKind, width: int, eps: float) -> nn.RMSNorm | nn.LayerNorm:
    """Return a norm over the last axis, of size `width`."""
    if kind == "rmsnorm":
        return RMSNorm(width, eps=eps)
    return nn.LayerNorm(width, eps=eps, bias=False)

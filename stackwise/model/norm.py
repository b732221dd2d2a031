"""Norms: RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) and LayerNorm, without biases."""

from __future__ import annotations

from torch import nn

from stackwise.config import NormKind

__all__ = ["create_norm"]


def create_norm(kind: NormKind, width: int, eps: float) -> nn.RMSNorm | nn.LayerNorm:
    """A norm over the last axis, of size `width`."""
    if kind == "rmsnorm":
        return nn.RMSNorm(width, eps=eps)
    return nn.LayerNorm(width, eps=eps, bias=False)

"""Precision: the dtype that a step computes in. Weights and optimizer state stay float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["autocast"]


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Context of the forward pass: "fp32" computes as the weights are, "bf16" under autocast.

    bfloat16 has the exponent range of float32, so the loss needs no scaling.
    """
    match precision:
        case "fp32":
            return nullcontext()
        case "bf16":
            return torch.autocast(device.type, dtype=torch.bfloat16)
    raise ValueError(f"precision: got {precision!r}; allowed: 'fp32', 'bf16'")

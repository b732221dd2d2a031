"""Precision: the dtype that a step computes in. What is learned is kept in float32 in any case."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["autocast"]


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Context of the forward pass: "bf16" is autocast; otherwise it computes as the weights are.

    bfloat16 has the exponent range of float32, so the loss needs no scaling.
    """
    match precision:
        case "fp32" | "bf16_weights":
            return nullcontext()
        case "bf16":
            return torch.autocast(device.type, dtype=torch.bfloat16)
    raise ValueError(f"precision: got {precision!r}; allowed: 'fp32', 'bf16', 'bf16_weights'")

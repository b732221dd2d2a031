"""Engine: supported engines and loss scale of a trainer that uses accelerate or a `GradScaler`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stackwise.support.arguments import require

__all__ = ["check_engine", "scale_of"]

_ENGINES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")  # engines of accelerate with gradients in the parameters


def check_engine(accelerator: Any) -> bool:
    """Refuse an `accelerate.Accelerator` that does not expose the gradients.

    Returns:
        True if weights are sharded.

    Raises:
        ValueError: DeepSpeed, FSDP1 and other engines.
    """
    engine: str = accelerator.distributed_type.value
    sharded = engine == "FSDP"
    known = engine in _ENGINES and (not sharded or getattr(accelerator, "is_fsdp2", False))
    wanted = "one process, DDP or FSDP2, whose gradients are those of the parameters"
    require(known, "distributed_type", engine, wanted)
    return sharded


def scale_of(scaler: Any, device: torch.device) -> Tensor | None:
    """Return the current loss scale of a `torch.amp.GradScaler`, one element; None without a scaler."""
    if scaler is None:
        return None
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale

"""Engine: where a trainer of others has its gradients, and what they are multiplied with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stackwise.support.arguments import require

__all__ = ["check_engine", "scale_of"]

_ENGINES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")  # of accelerate, whose gradients are in the parameters


def check_engine(accelerator: Any) -> bool:
    """Refuse an `accelerate.Accelerator` that keeps gradients to itself.

    Returns:
        whether weights are in shards.

    Raises:
        ValueError: DeepSpeed, FSDP1 and others.
    """
    engine: str = accelerator.distributed_type.value
    sharded = engine == "FSDP"
    known = engine in _ENGINES and (not sharded or getattr(accelerator, "is_fsdp2", False))
    wanted = "one process, DDP or FSDP2, whose gradients are those of the parameters"
    require(known, "distributed_type", engine, wanted)
    return sharded


def scale_of(scaler: Any, device: torch.device) -> Tensor | None:
    """What a `torch.amp.GradScaler` multiplies a loss with now: one element; None: there is no scaler."""
    if scaler is None:
        return None
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale

"""The clock: how long one call takes, the device's work included."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

__all__ = ["time_call"]


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Seconds from an idle device to an idle device again.

    Without the two synchronisations a call on CUDA is timed at its launch, not at its work.
    """
    _synchronize(device)
    start = time.perf_counter_ns()
    call()
    _synchronize(device)
    return (time.perf_counter_ns() - start) * 1e-9


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

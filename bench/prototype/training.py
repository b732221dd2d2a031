"""Training: one run of an `ArchitecturePrototype`, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from stackwise import StackWiseConfig, create_rack_from_config
from stackwise.prototype import ArchitecturePrototype

__all__ = ["train"]


def train(config: StackWiseConfig) -> Iterator[dict[str, Any]]:
    """One run of `training.max_steps` updates with one thread: its losses, its verdict and its speed."""
    torch.set_num_threads(1)
    steps = config.training.max_steps
    run = ArchitecturePrototype(config).run(steps, observe_every=steps)
    yield {
        "status": run.status,
        "step": run.step,
        "validation_loss": run.validation_loss,
        "final_loss": run.final_loss,
        "tokens": run.tokens,
        "tokens_per_second": run.tokens_per_second,
        "peak_bytes": run.peak_bytes,
        "parameters": sum(p.numel() for p in create_rack_from_config(config).parameters()),
    }

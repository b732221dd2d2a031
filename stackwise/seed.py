"""The seed: random choices that start from it inside, and leave the caller's random state alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]


@contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch on the CPU and on `device` for the length of the block, then put both back."""
    device = torch.device(device)
    cuda = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda):
        torch.manual_seed(seed)
        yield

"""The seed: random choices that start from it inside, and leave the caller's random state alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["seeded"]


@contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed Python, numpy and torch (the CPU and `device`) for the length of the block, then put all back.

    Other CUDA devices are left alone.
    """
    device = torch.device(device)
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002  the global one is meant
    cuda = []
    if device.type == "cuda":
        cuda = [torch.cuda.current_device() if device.index is None else device.index]
    try:
        with torch.random.fork_rng(cuda):
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            torch.default_generator.manual_seed(seed)
            for index in cuda:
                torch.cuda.default_generators[index].manual_seed(seed)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002

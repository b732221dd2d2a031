"""Seeds: random choices that start from one and leave the caller's random state alone; several of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from stackwise.argument import check_sizes, require

__all__ = ["chosen_seeds", "seeded"]


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


def chosen_seeds(
    seeds: int | Sequence[int], first: int = 0, *, apart: int = 1, key: str = "seeds"
) -> tuple[int, ...]:
    """The seeds that a number of them means, or those that are given.

    Args:
        seeds: how many, from `first` on; or which, each once.
        first: of a number of them.
        apart: what is between two of these.
        key: for the error.

    Raises:
        ValueError: none, one of them twice, or what is no seed.
    """
    if not isinstance(seeds, Iterable):
        check_sizes(**{key: seeds})
        return tuple(first + i * apart for i in range(seeds))
    chosen = tuple(seeds)
    require(bool(chosen), key, chosen, "at least one")
    for seed in chosen:
        check_sizes(0, **{key: seed})
    require(len(set(chosen)) == len(chosen), key, chosen, "each once")
    return chosen

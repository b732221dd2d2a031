"""The random states of this process as a value: Python's, numpy's, torch's, and those of CUDA devices."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["random_states", "random_states_kept", "random_states_set", "set_random_states"]


def random_states() -> dict[str, Any]:
    """As they are now; can be saved."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  the global one is meant
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Go on from `states`; those of CUDA where there is as much of it as there was."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    if "cuda" in states and torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
            torch.cuda.set_rng_state(state, device)


@contextmanager
def random_states_set(states: Mapping[str, Any]) -> Iterator[None]:
    """Inside, random choices go on from `states`; afterwards from where they were."""
    with random_states_kept():
        set_random_states(states)
        yield


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Inside, random choices go on; afterwards from where they were."""
    before = random_states()
    try:
        yield
    finally:
        set_random_states(before)

"""The random states of this process as a value: Python's, numpy's, torch's, and those of its CUDA devices."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = [
    "random_states",
    "random_states_equal",
    "random_states_kept",
    "random_states_set",
    "set_random_states",
]


def random_states() -> dict[str, Any]:
    """As they are now; can be saved. Of CUDA devices those that this process uses, by number."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  the global one is meant
    }
    if used := _cuda_devices_in_use():
        states["cuda"] = {device: torch.cuda.get_rng_state(device) for device in used}
    return states


def random_states_equal(states: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether these are the same: of all parts, and of the same CUDA devices."""
    same = torch.equal(states["torch"], others["torch"]) and states["python"] == others["python"]
    mine, theirs = states["numpy"], others["numpy"]
    same = same and all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
    devices, of_others = states.get("cuda", {}), others.get("cuda", {})
    return (
        same
        and devices.keys() == of_others.keys()
        and all(torch.equal(state, of_others[device]) for device, state in devices.items())
    )


def set_random_states(states: Mapping[str, Any]) -> None:
    """Go on from `states`. Of CUDA those devices that are among them, and no other.

    Where there is one, of a number that this machine does not have, its state is the current device's.
    """
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    kept = states.get("cuda", {})
    if not kept or not torch.cuda.is_available():
        return
    count = torch.cuda.device_count()
    if len(kept) == 1 and next(iter(kept)) >= count:
        kept = {torch.cuda.current_device(): next(iter(kept.values()))}
    for device, state in kept.items():
        if device < count:
            torch.cuda.set_rng_state(state, device)


def _cuda_devices_in_use() -> list[int]:
    """The current one, and all others that this process has begun to use."""
    if not torch.cuda.is_available():
        return []
    current = torch.cuda.current_device()
    # To ask in any other way would begin to use them.
    begun = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    return [device for device in range(torch.cuda.device_count()) if device == current or begun(device)]


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

"""Random state: seed, save and restore the generators of Python, NumPy and torch."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from stackwise.support.arguments import check_sizes, require

__all__ = [
    "choose_seeds",
    "keep_random_states",
    "random_states",
    "random_states_equal",
    "seeded",
    "set_random_states",
    "use_random_states",
]


@contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed Python, NumPy and torch (CPU and `device`). Restore the previous states after the block.

    Other CUDA devices keep their states.
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


def choose_seeds(
    seeds: int | Sequence[int], first: int = 0, *, step: int = 1, key: str = "seeds"
) -> tuple[int, ...]:
    """Return the seeds of several runs.

    Args:
        seeds: number of seeds, or the seeds themselves.
        first: the first seed, if `seeds` is a number.
        step: difference between two seeds, if `seeds` is a number.
        key: name of the argument for the error.

    Raises:
        ValueError: no seed, a seed twice, or a value that is no integer >= 0.
    """
    if not isinstance(seeds, Iterable):
        check_sizes(**{key: seeds})
        return tuple(first + i * step for i in range(seeds))
    chosen = tuple(seeds)
    require(bool(chosen), key, chosen, "at least one seed")
    for seed in chosen:
        check_sizes(0, **{key: seed})
    require(len(set(chosen)) == len(chosen), key, chosen, "distinct seeds")
    return chosen


def random_states() -> dict[str, Any]:
    """Return the states of all generators as a value that can be saved.

    CUDA states are included for the devices that this process uses, by device number.
    """
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  the global one is meant
    }
    if used := _cuda_devices_in_use():
        states["cuda"] = {device: torch.cuda.get_rng_state(device) for device in used}
    return states


def random_states_equal(states: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Return True if two values of `random_states` are equal and have the same CUDA devices."""
    same = torch.equal(states["torch"], others["torch"]) and states["python"] == others["python"]
    pairs = zip(states["numpy"], others["numpy"], strict=True)
    same = same and all(np.array_equal(one, other) for one, other in pairs)
    devices, other_devices = states.get("cuda", {}), others.get("cuda", {})
    return (
        same
        and devices.keys() == other_devices.keys()
        and all(torch.equal(state, other_devices[device]) for device, state in devices.items())
    )


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore a value of `random_states`. CUDA devices without a saved state keep theirs.

    If it has one CUDA device and this machine has no device with that number, the current device gets the
    state.
    """
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    saved = states.get("cuda", {})
    if not saved or not torch.cuda.is_available():
        return
    count = torch.cuda.device_count()
    if len(saved) == 1 and next(iter(saved)) >= count:
        saved = {torch.cuda.current_device(): next(iter(saved.values()))}
    for device, state in saved.items():
        if device < count:
            torch.cuda.set_rng_state(state, device)


@contextmanager
def use_random_states(states: Mapping[str, Any]) -> Iterator[None]:
    """Set `states` for the block, and restore the previous states after it."""
    with keep_random_states():
        set_random_states(states)
        yield


@contextmanager
def keep_random_states() -> Iterator[None]:
    """Restore the current states after the block."""
    before = random_states()
    try:
        yield
    finally:
        set_random_states(before)


def _cuda_devices_in_use() -> list[int]:
    """Return the current CUDA device and all others that this process has initialised."""
    if not torch.cuda.is_available():
        return []
    current = torch.cuda.current_device()
    # The public functions would initialise a device.
    is_initialised = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    devices = range(torch.cuda.device_count())
    return [device for device in devices if device == current or is_initialised(device)]

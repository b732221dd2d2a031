"""Cache state: whether a call finds its data in the last-level cache, and how to see to it that it does not.

Called again and again on the same data, a call that reads less than the cache holds reads it from there: it
is "warm". In a whole model the same operation finds what others have left: it is "cold".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree

from stackwise.support.arguments import check_sizes, require
from stackwise.support.tensor_tree import tensors_of

__all__ = ["CACHE_STATES", "CacheFlush", "RotatingCall", "last_level_cache_bytes", "rotating_inputs"]

CACHE_STATES = ("cold", "warm")
# Of the cache. A sweep of exactly its size would leave what the replacement policy happens to keep.
_SWEEP, _ROTATION = 2, 5
_CORES = Path("/sys/devices/system/cpu")
_UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3}

T = TypeVar("T")


def last_level_cache_bytes(device: torch.device) -> int | None:
    """What all last-level caches of a device hold; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size) or None
    # Each of the cores that share a cache tells of it.
    found = {(_of(each, "level"), _of(each, "shared_cpu_list")): each for each in _caches()}
    sizes = {key: _bytes(_of(each, "size")) for key, each in found.items()}
    last = max(sizes, default=None)
    size = 0 if last is None else sum(size for (level, _), size in sizes.items() if level == last[0])
    if last is None and "SC_LEVEL3_CACHE_SIZE" in getattr(os, "sysconf_names", {}):
        size = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    return size if size > 0 else None


class CacheFlush:
    """Called before each sample, it leaves nothing of the call before in the last-level cache.

    It reads twice what the cache holds. It does not write: lines that were written are written back
    while the next call runs, at that call's cost.

    Args:
        device: whose cache.
        size_bytes: what is read; None: twice the cache.

    Raises:
        ValueError: the size of the cache is not known, and none is given.
    """

    def __init__(self, device: torch.device, size_bytes: int | None = None) -> None:
        if size_bytes is None:
            size_bytes = _SWEEP * _known_cache(device, "size_bytes")
        check_sizes(size_bytes=size_bytes)
        self._data = _normals(max(1, size_bytes // 4), device)
        self._sum = torch.empty((), device=device)

    def __call__(self) -> None:
        """Read all of it. On CUDA that is launched, not waited for: it comes before what is launched next."""
        torch.sum(self._data, dim=0, out=self._sum)


class RotatingCall(Generic[T]):
    """A call that takes the next of several inputs each time, so that it finds none of them in the cache.

    For what is too short to be timed one by one, and inside CUDA graphs, where nothing can be flushed between
    two calls. The inputs are cold; what else the call reads, such as weights, is as warm as it gets.

    Args:
        call: is given one of the inputs.
        inputs: trees of tensors, together at least five times as large as the cache of their device, as
            `rotating_inputs` makes them.

    Raises:
        ValueError: no tensors in the inputs, or too few of them.
    """

    def __init__(self, call: Callable[[T], object], inputs: Sequence[T]) -> None:
        tensors = [leaf for each in inputs for leaf in tensors_of(each)]
        require(bool(tensors), "inputs", inputs, "one or more trees of tensors")
        wanted = _ROTATION * _known_cache(tensors[0].device, "inputs")
        size = sum(t.nbytes for t in tensors)
        if size < wanted:
            raise ValueError(
                f"inputs: got {size} bytes; allowed: {wanted} bytes, five times the cache, or more. "
                f"`rotating_inputs` makes enough copies."
            )
        self._call, self._next = call, cycle(inputs).__next__

    def __call__(self) -> object:
        """Call with the next input."""
        return self._call(self._next())


def rotating_inputs(example: T, device: torch.device) -> list[T]:
    """So many copies of a tree of tensors that together they are five times as large as the device's cache.

    Raises:
        ValueError: there is no tensor in the example, or the size of the cache is not known.
    """
    size = sum(t.nbytes for t in tensors_of(example))
    require(size > 0, "example", example, "a tree with tensors that are not empty")
    count = -(-_ROTATION * _known_cache(device, "example") // size)

    def copied(leaf: object) -> object:
        return leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf

    return [_pytree.tree_map(copied, example) for _ in range(count)]


def _known_cache(device: torch.device, key: str) -> int:
    size = last_level_cache_bytes(device)
    if size is None:
        raise ValueError(f"{key}: this machine does not say how large the last-level cache of {device} is")
    return size


def _normals(count: int, device: torch.device) -> Tensor:
    """Random normals: zeros would cost less power, which raises the clocks of what runs next."""
    return torch.randn(count, device=device, generator=torch.Generator(device).manual_seed(0))


def _caches() -> Iterator[Path]:
    return (path for path in _CORES.glob("cpu[0-9]*/cache/index*") if (path / "size").exists())


def _of(cache: Path, key: str) -> str:
    return (cache / key).read_text().strip()


def _bytes(text: str) -> int:
    """Of a size as the Linux kernel writes it: 32768K."""
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else int(text)

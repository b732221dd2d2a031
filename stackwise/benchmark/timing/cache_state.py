"""Cache state: calls that find their data in the last-level cache ("warm"), and calls that do not ("cold").

If a call is repeated on the same data and reads less than the size of the cache, it reads from the cache: it
is "warm". In a complete model, the same operation finds data of other operations in the cache: it is "cold".
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
# Multiples of the size of the cache. After a sweep of exactly its size, the remaining data would depend on
# the replacement policy.
_SWEEP, _ROTATION = 2, 5
_CORES = Path("/sys/devices/system/cpu")
_UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3}

T = TypeVar("T")


def last_level_cache_bytes(device: torch.device) -> int | None:
    """Return the total size of a device's last-level caches in bytes. None: the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size) or None
    # Each core reports the caches that it shares, so identify a cache by level and cores.
    found = {(_of(each, "level"), _of(each, "shared_cpu_list")): each for each in _caches()}
    sizes = {key: _bytes(_of(each, "size")) for key, each in found.items()}
    last = max(sizes, default=None)
    size = 0 if last is None else sum(size for (level, _), size in sizes.items() if level == last[0])
    if last is None and "SC_LEVEL3_CACHE_SIZE" in getattr(os, "sysconf_names", {}):
        size = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    return size if size > 0 else None


class CacheFlush:
    """Callable that evicts the data of the previous call from the last-level cache, before each sample.

    It reads twice the size of the cache. It does not write, because written cache lines would be written back
    during the next call, at the cost of that call.

    Args:
        device: device with the cache.
        size_bytes: number of bytes to read. None: twice the size of the cache.

    Raises:
        ValueError: `size_bytes` is None, and the size of the cache is unknown.
    """

    def __init__(self, device: torch.device, size_bytes: int | None = None) -> None:
        if size_bytes is None:
            size_bytes = _SWEEP * _known_cache(device, "size_bytes")
        check_sizes(size_bytes=size_bytes)
        self._data = _normals(max(1, size_bytes // 4), device)
        self._sum = torch.empty((), device=device)

    def __call__(self) -> None:
        """Read all data.

        On CUDA, the read is launched before later work, and the host does not wait for it.
        """
        torch.sum(self._data, dim=0, out=self._sum)


class RotatingCall(Generic[T]):
    """Call that takes the next of several inputs each time, so that the input is never in the cache.

    It is meant for calls that are too short to be timed separately, and for CUDA graphs, in which the cache
    cannot be flushed between two calls. The inputs are cold. Other data of the call, such as weights, is as
    warm as possible.

    Args:
        call: function of one of the inputs.
        inputs: trees of tensors, together at least five times as large as the cache of their device, such as
            the result of `rotating_inputs`.

    Raises:
        ValueError: the inputs have no tensors, or are too small.
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
    """Return copies of a tree of tensors that together are five times as large as the device's cache.

    Raises:
        ValueError: the example has no tensor, or the size of the cache is unknown.
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
    """Return random normals. Zeros would use less power, which raises the clocks for the next call."""
    return torch.randn(count, device=device, generator=torch.Generator(device).manual_seed(0))


def _caches() -> Iterator[Path]:
    return (path for path in _CORES.glob("cpu[0-9]*/cache/index*") if (path / "size").exists())


def _of(cache: Path, key: str) -> str:
    return (cache / key).read_text().strip()


def _bytes(text: str) -> int:
    """Return the number of bytes of a size in the format of the Linux kernel, such as 32768K."""
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else int(text)

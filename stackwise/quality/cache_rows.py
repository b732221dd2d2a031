"""CacheRows: selects rows of a model's cache, to build the cache of another set of sequences."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = ["CacheRows"]

Step = tuple[Literal["key", "attribute"], Any]
Path = tuple[Step, ...]


class CacheRows:
    """Tensors of a cache that have one row per sequence, found by a comparison of two caches.

    Args:
        two: cache of two sequences.
        three: cache of three sequences of the same length.

    Raises:
        TypeError: the caches differ in more than their rows, or have no rows. They have none if the model
            stores the rows itself.
    """

    def __init__(self, two: Any, three: Any) -> None:
        self._dims: dict[Path, int] = {}
        self._counts: list[Path] = []
        before, after = dict(_leaves(two)), dict(_leaves(three))
        if before.keys() != after.keys():
            raise TypeError("its caches differ in more than their rows")
        for path, a in before.items():
            b = after[path]
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                if a.shape != b.shape:
                    self._dims[path] = _row_dim(a, b)
            elif (a, b) == (2, 3):
                self._counts.append(path)
        if not self._dims:
            raise TypeError("there is no tensor with a row for each sequence in its cache")

    def take(self, cache: Any, rows: Tensor) -> Any:
        """Return a new cache with the given rows of `cache`.

        Args:
            cache: cache of the model. It is not changed.
            rows: int64 (B,), on the device of the cache. A row may be repeated.
        """
        taken: dict[int, Any] = {}
        for path, leaf in _leaves(cache):
            if isinstance(leaf, Tensor) and path in self._dims:
                taken[id(leaf)] = leaf.index_select(self._dims[path], rows.to(leaf.device))
        for each in _shared(cache):
            taken[id(each)] = each
        # deepcopy does not copy the objects in `taken`, but uses their replacements.
        copied = copy.deepcopy(cache, taken)
        for path in self._counts:
            _put(copied, path, len(rows))
        return copied


def _row_dim(two: Tensor, three: Tensor) -> int:
    differing = [d for d, (a, b) in enumerate(zip(two.shape, three.shape, strict=False)) if a != b]
    if two.ndim == three.ndim and len(differing) == 1:
        [d] = differing
        if (two.shape[d], three.shape[d]) == (2, 3):
            return d
    shapes = f"{tuple(two.shape)} for two sequences, {tuple(three.shape)} for three"
    raise TypeError(f"a tensor of its cache is of shape {shapes}")


def _leaves(value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield all reachable tensors and integers with their paths."""
    yield from _walk(value, (), set())


def _walk(value: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Tensor) or (isinstance(value, int) and not isinstance(value, bool)):
        yield path, value
        return
    if id(value) in seen or _is_shared(value):
        return
    seen.add(id(value))
    for step, child in _children(value):
        yield from _walk(child, (*path, step), seen)


def _children(value: Any) -> Iterator[tuple[Step, Any]]:
    if isinstance(value, str | bytes | float | complex | None):
        return
    if isinstance(value, Mapping):
        yield from ((("key", key), child) for key, child in value.items())
    elif isinstance(value, list | tuple):
        yield from ((("key", i), child) for i, child in enumerate(value))
    for name in _slots(type(value)):
        if hasattr(value, name):
            yield ("attribute", name), getattr(value, name)
    yield from ((("attribute", name), child) for name, child in getattr(value, "__dict__", {}).items())


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        yield from [names] if isinstance(names, str) else names


def _is_shared(value: Any) -> bool:
    """Return True for an object that caches refer to, but do not own."""
    plain = isinstance(value, nn.Module | type | torch.device | torch.dtype | torch.Generator)
    return plain or callable(value) or hasattr(value, "to_diff_dict")


def _shared(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, Tensor):
        return
    seen.add(id(value))
    if _is_shared(value):
        yield value
        return
    for _, child in _children(value):
        yield from _shared(child, seen)


def _put(value: Any, path: Path, count: int) -> None:
    *way, (kind, name) = path
    for step, key in way:
        value = value[key] if step == "key" else getattr(value, key)
    if kind == "attribute":
        object.__setattr__(value, name, count)
    elif isinstance(value, list | MutableMapping):
        value[name] = count
    else:
        raise TypeError(f"the number of sequences is in a {type(value).__name__} of its cache")

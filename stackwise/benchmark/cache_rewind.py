"""Restored caches: every decode step receives its cache in the same state."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import EllipsisType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["RewoundCache", "is_changed_by"]

# Types of values that cannot change, and are compared by value.
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, type, ModuleType, EllipsisType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype, np.generic),
)


class RewoundCache:
    """Cache that is restored from a copy of an unused original.

    Args:
        fill: function that creates a cache with the context. The result is stored, and only its copies are
            used.
        name: name of the model in errors.

    Raises:
        TypeError: the cache cannot be copied.
    """

    def __init__(self, fill: Callable[[], Any], name: str) -> None:
        self._fill, self._name = fill, name
        self._kept: Any = fill()
        self._copy: Any = None
        self._fresh = False
        self.rewind()

    def rewind(self) -> None:
        """Create the copy that the next `take` returns.

        The cost is that of copying the bytes of the cache.
        """
        self._copy = None  # free its memory for the next copy
        if self._kept is None:
            self._kept = self._fill()
        try:
            self._copy = copy.deepcopy(self._kept)
        except Exception as error:
            raise TypeError(
                f"decode: the cache of {self._name}, a {type(self._kept).__name__}, cannot be copied, so "
                f"that no second call would find it as the first did: {type(error).__name__}: {error}"
            ) from error
        self._fresh = True

    def rewind_alone(self) -> None:
        """Let the next `take` return the original instead of a copy, so that only one cache is in memory.

        This is the memory of a model outside of a measurement. The next `rewind` fills a new original.
        """
        self._copy = None
        self._copy, self._kept = self._fill() if self._kept is None else self._kept, None
        self._fresh = True

    def take(self) -> Any:
        """Return a cache in the original state.

        Rewind it first if it was not rewound since the last `take`.
        """
        if not self._fresh:
            self.rewind()
        self._fresh = False
        return self._copy


def is_changed_by(step: Callable[[Any], object], cache: Any) -> bool:
    """Return True if `step(cache)` changes the cache: a shape, a tensor that is written to, or a number.

    A cache that is returned as a new object at each step is not changed, nor are positions in a cache that
    the model stores itself. Objects that cannot be inspected, such as an array of NumPy, are treated as
    changed.
    """
    before = _state(cache, {})
    step(cache)
    return bool(_state(cache, {}) != before)


def _state(value: Any, seen: dict[int, Any]) -> Any:
    """Return shapes and versions of all reachable tensors, and all plain values."""
    if isinstance(value, _PLAIN) and not isinstance(
        value, np.void
    ):  # np.void has fields that can be assigned
        return value
    if isinstance(value, Tensor):
        # A tensor created in inference mode has no version. It is treated as written to.
        return (id(value), tuple(value.shape), object() if value.is_inference() else value._version)
    if id(value) in seen:
        return None
    seen[id(value)] = value
    parts = _parts(value)
    if parts is None:
        return value if callable(value) or _holds_nothing(type(value)) else object()
    return [(name, _state(part, seen)) for name, part in parts]


def _parts(value: Any) -> Iterable[tuple[object, Any]] | None:
    """Return the items or attributes of an object, each with a name. None: it has none that can be read."""
    match value:
        case Mapping():
            return ((repr(key), item) for key, item in value.items())
        case slice():
            return enumerate((value.start, value.stop, value.step))
        case list() | tuple() | set() | frozenset() | deque():
            return enumerate(value)
    slots = list(_slots(type(value)))
    if not slots and not hasattr(value, "__dict__"):
        return None
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return (attributes | getattr(value, "__dict__", {})).items()


def _holds_nothing(kind: type) -> bool:
    """Return True if a type without dict and slots has no state, such as `object` or an enum of pybind."""
    by_its_slots = all("__slots__" in base.__dict__ for base in kind.__mro__[:-1])
    return by_its_slots or isinstance(getattr(kind, "__members__", None), dict)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        yield from [names] if isinstance(names, str) else names

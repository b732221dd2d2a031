"""Cache rewind: a decode step that finds its cache as it was, however often it is called."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import EllipsisType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["RewoundCache", "is_changed_by"]


class RewoundCache:
    """A cache that is put back to how it was, by a copy of what has never been used.

    Args:
        fill: makes a cache that holds the context. It is kept, and not used itself.
        name: of the model, in errors.

    Raises:
        TypeError: a cache that cannot be copied.
    """

    def __init__(self, fill: Callable[[], Any], name: str) -> None:
        self._fill, self._name = fill, name
        self._kept: Any = fill()
        self._copy: Any = None
        self._fresh = False
        self.rewind()

    def rewind(self) -> None:
        """Make the copy that the next `take` gives. Costs what the cache's bytes cost to copy."""
        self._copy = None  # its memory serves the next one
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
        """Have the next `take` give the cache that is kept, so that there is no other in memory.

        As a model has it that nobody measures. The next `rewind` fills another.
        """
        self._copy = None
        self._copy, self._kept = self._fill() if self._kept is None else self._kept, None
        self._fresh = True

    def take(self) -> Any:
        """A cache as it was. One that nobody has rewound since the last time is rewound now."""
        if not self._fresh:
            self.rewind()
        self._fresh = False
        return self._copy


def is_changed_by(step: Callable[[Any], object], cache: Any) -> bool:
    """Whether `step(cache)` changes the cache: another shape, a tensor written to, another number in it.

    Caches that are handed on anew at each step, and positions in a cache that the model keeps, are not. What
    cannot be looked into, as an array of NumPy, counts as changed.
    """
    before = _state(cache, {})
    step(cache)
    return bool(_state(cache, {}) != before)


def _state(value: Any, seen: dict[int, Any]) -> Any:
    """Shapes and versions of all tensors that can be reached, and all plain values."""
    match value:
        case None | bool() | int() | float() | complex() | str() | bytes() | range():
            return value
        case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
            return value
        case type() | ModuleType() | EllipsisType() | np.dtype():
            return value
        case np.generic() if not isinstance(value, np.void):  # whose fields can be assigned
            return value
        case slice():
            return [_state(item, seen) for item in (value.start, value.stop, value.step)]
        case Tensor():
            # A tensor made in inference mode has no version: it counts as written to.
            version = object() if value.is_inference() else value._version
            return (id(value), tuple(value.shape), version)
    if id(value) in seen:
        return None
    seen[id(value)] = value
    match value:
        case Mapping():
            return [(repr(key), _state(item, seen)) for key, item in value.items()]
        case list() | tuple() | set() | frozenset() | deque():
            return [_state(item, seen) for item in value]
    slots = list(_slots(type(value)))
    if not slots and not hasattr(value, "__dict__"):
        return value if callable(value) or _holds_nothing(type(value)) else object()
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    attributes |= getattr(value, "__dict__", {})
    return [(name, _state(item, seen)) for name, item in attributes.items()]


def _holds_nothing(kind: type) -> bool:
    """Whether what has neither a dict nor slots has no state at all: an object() alone, an enum of pybind."""
    by_its_slots = all("__slots__" in base.__dict__ for base in kind.__mro__[:-1])
    return by_its_slots or isinstance(getattr(kind, "__members__", None), dict)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = base.__dict__.get("__slots__", ())
        yield from [names] if isinstance(names, str) else names

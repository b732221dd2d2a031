"""patched: replaces an attribute within a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["patched"]

_MISSING = object()


@contextmanager
def patched(holder: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `holder.name` by `wrap` of its value within the block, and restore it afterwards.

    An inherited attribute is inherited afterwards, too.
    """
    own = vars(holder).get(name, _MISSING)
    setattr(holder, name, wrap(getattr(holder, name)))
    try:
        yield
    finally:
        if own is _MISSING:
            delattr(holder, name)
        else:
            setattr(holder, name, own)

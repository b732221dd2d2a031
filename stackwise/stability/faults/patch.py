"""patched: an attribute replaced for the length of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["patched"]

_MISSING = object()


@contextmanager
def patched(holder: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, `holder.name` is `wrap` of what it was; after it, what it was, also where that is inherited."""
    own = vars(holder).get(name, _MISSING)
    setattr(holder, name, wrap(getattr(holder, name)))
    try:
        yield
    finally:
        if own is _MISSING:
            delattr(holder, name)
        else:
            setattr(holder, name, own)

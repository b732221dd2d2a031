"""Whether what runs is a step computed again, to see if it breaks again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["is_recomputation", "recomputation"]

_UNDER_WAY = ContextVar("stackwise.stability.recomputation", default=False)


@contextmanager
def recomputation() -> Iterator[None]:
    """Inside, steps are computed again."""
    token = _UNDER_WAY.set(True)
    try:
        yield
    finally:
        _UNDER_WAY.reset(token)


def is_recomputation() -> bool:
    """Whether this is inside of `recomputation`.

    A fault of the machine, such as one in gradients, does not come again then; one of a batch does.
    """
    return _UNDER_WAY.get()

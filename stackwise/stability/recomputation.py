"""Whether what runs is a step computed again, to see if it breaks again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

__all__ = ["is_recomputation", "is_reference", "recomputation"]

_UNDER_WAY: ContextVar[Literal["", "broken", "sound"]] = ContextVar(
    "stackwise.stability.recomputation", default=""
)


@contextmanager
def recomputation(of: Literal["broken", "sound"] = "broken") -> Iterator[None]:
    """Inside, steps are computed again.

    Args:
        of: the broken one, or sound ones before it, which it is compared with.
    """
    token = _UNDER_WAY.set(of)
    try:
        yield
    finally:
        _UNDER_WAY.reset(token)


def is_recomputation() -> bool:
    """Whether this is inside of `recomputation`.

    A fault of the machine, such as one in gradients, does not come again then; one of a batch does.
    """
    return bool(_UNDER_WAY.get())


def is_reference() -> bool:
    """Whether this is inside of `recomputation("sound")`: no fault of any kind acts there."""
    return _UNDER_WAY.get() == "sound"

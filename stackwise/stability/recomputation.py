"""Recomputation: marks the recomputation of a step, which tests if the step is bad a second time."""

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
    """Mark the block as a recomputation of steps.

    Args:
        of: "broken": the bad step. "sound": earlier healthy steps, with which it is compared.
    """
    token = _UNDER_WAY.set(of)
    try:
        yield
    finally:
        _UNDER_WAY.reset(token)


def is_recomputation() -> bool:
    """Return True inside `recomputation`.

    A fault of the machine, such as one in gradients, does not act in a recomputation. A fault of a batch
    does.
    """
    return bool(_UNDER_WAY.get())


def is_reference() -> bool:
    """Return True inside `recomputation("sound")`, where no fault acts."""
    return _UNDER_WAY.get() == "sound"

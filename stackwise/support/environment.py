"""Environment: a variable that is set in a block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["environment_variable"]


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable in the block, also for child processes, and restore its previous value afterwards."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

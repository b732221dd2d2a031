"""Hooks of modules that are removed at the end of a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from torch.utils.hooks import RemovableHandle

__all__ = ["temporary_hooks"]


@contextmanager
def temporary_hooks(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of the block.

    Args:
        handles: results of the methods that register the hooks.
    """
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield

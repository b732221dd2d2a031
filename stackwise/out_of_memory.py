"""Out of memory: errors that say that there is no more of it, and nothing of the model that was called."""

from __future__ import annotations

import torch

__all__ = ["is_out_of_memory"]

# What allocators say that raise no error of their own.
_TEXTS = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was too small, of a device or of the host.

    Where a model is asked whether it can do something, an error is an answer, but this one is not: the same
    model could do it on a machine with more memory.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).lower()
    return any(text in said for text in _TEXTS)

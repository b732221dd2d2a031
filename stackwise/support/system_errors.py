"""System errors: a full disk and exhausted memory, recognised in the exceptions of libraries."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import torch
from safetensors import SafetensorError

__all__ = [
    "false_if_raised",
    "is_out_of_memory",
    "reraise_if_out_of_memory",
    "reraise_unless_failure",
    "safetensors_as_os_error",
]

P = ParamSpec("P")

_IO_ERROR = re.compile(r"I/O error(.*\(os error (?P<number>\d+)\))?", re.DOTALL)
# Texts of allocators that do not raise torch.OutOfMemoryError.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception means that the memory of a device or of the host was exhausted.

    Code that tries if a model supports a call must not treat this exception as a "no": the same call can
    succeed on a machine with more memory.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return any(phrase in text for phrase in _OUT_OF_MEMORY)


def reraise_if_out_of_memory(error: BaseException) -> None:
    """Raise `error` again if it means that memory was exhausted."""
    if is_out_of_memory(error):
        raise error


def false_if_raised(trial: Callable[P, bool]) -> Callable[P, bool]:
    """Return a function that returns False if `trial` raises an exception. Exhausted memory is raised."""

    @wraps(trial)
    def tried(*args: P.args, **kwargs: P.kwargs) -> bool:
        try:
            return trial(*args, **kwargs)
        except Exception as error:  # libraries and models raise any type
            reraise_if_out_of_memory(error)
            return False

    return tried


@contextmanager
def safetensors_as_os_error(path: Path) -> Iterator[None]:
    """Raise system errors of safetensors, such as a full disk, as OSError. Other exceptions pass unchanged.

    Args:
        path: the file that is written in the block, for the exception.

    Raises:
        OSError: with `path`, and with the error number if safetensors reports it.
    """
    try:
        yield
    except SafetensorError as error:
        found = _IO_ERROR.search(str(error))
        if found is None:
            raise
        raise OSError(int(found["number"] or 0), str(error), str(path)) from error


def reraise_unless_failure(error: BaseException) -> None:
    """Raise an error again that is not an Exception, such as KeyboardInterrupt.

    `torch.distributed.checkpoint` reports failures by a CheckpointException, which is a BaseException.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "CheckpointException":
        raise error

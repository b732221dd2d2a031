"""Disk errors: that a disk refuses is an `OSError`, whoever writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

__all__ = ["told_as_os_error"]

# As safetensors says it, and as it did before 0.5.4.
_SYSTEM = re.compile(r"I/O error|IoError")
_NUMBER = re.compile(r"\(os error (\d+)\)|\bOs \{ code: (\d+)")


@contextmanager
def told_as_os_error(path: Path) -> Iterator[None]:
    """Raise what safetensors says of the system, as of a full disk, as Python does.

    Args:
        path: of the file that is written.

    Raises:
        OSError: with the path, and its number, as `ENOSPC`, where it is known; errors of another kind are
            let through.
    """
    try:
        yield
    except SafetensorError as error:
        said = str(error)
        found = _NUMBER.search(said)
        if found is None and _SYSTEM.search(said) is None:
            raise
        raise OSError(int(found[1] or found[2]) if found else 0, said, str(path)) from error

"""Text files that a reader never sees half of."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, text: str) -> None:
    """Write a text file as UTF-8, in the place of what `path` has, whose folder is made where there is none.

    It has its name only once it is whole; what cannot be written leaves the old file as it was.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside it, since only within one file system a rename is atomic.
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)

"""Files: atomic writes, and JSON of unknown origin."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["parse_json", "replacing", "write_whole"]

_MAX_DIGITS = 300


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text that a user or another program wrote.

    Raises:
        ValueError: the text is not JSON in UTF-8, is nested too deeply for Python, or has an integer of more
            than 300 digits, which no float can hold.
    """
    try:
        return json.loads(
            content if isinstance(content, str) else content.decode("utf-8"), parse_int=_integer
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits; allowed: {_MAX_DIGITS}")
    return int(text)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path. Rename it to `path` on success. On error, the old file stays."""
    # A rename is atomic only within a file system, so the scratch file is in the same folder.
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically, as UTF-8. Create its folder if it does not exist.

    Characters that UTF-8 cannot encode are escaped.

    Raises:
        OSError: the file cannot be written. An old file of that name is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as scratch:
            scratch.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error

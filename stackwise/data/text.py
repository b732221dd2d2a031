"""Text that is included in every CPython, so that a first training needs no download."""

from __future__ import annotations

import sysconfig
import tokenize
from pathlib import Path

__all__ = ["documentation_pages", "documentation_text", "standard_library_files", "standard_library_text"]

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def documentation_pages() -> list[str]:
    """Return the pages of `documentation_text` in its order."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def documentation_text() -> str:
    """Return the documentation of the Python language in every CPython: about 450 kB of English."""
    return "\n\n".join(documentation_pages())


def standard_library_files() -> list[str]:
    """Return the texts of the files of `standard_library_text` in its order.

    Raises:
        FileNotFoundError: this Python has no folder with source files of its standard library.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path
        for path in folder.rglob("*.py")
        if path.is_file() and _LEFT_OUT.isdisjoint(path.relative_to(folder).parts)
    )
    if not paths:
        raise FileNotFoundError(f"{folder}: no source files of the standard library")
    texts = []
    for path in paths:
        with tokenize.open(path) as file:  # with the encoding that the file declares
            texts.append(file.read())
    return texts


def standard_library_text() -> str:
    """Return the source code of the standard library of this Python, without its tests.

    It has about 12 MB in 3.11. It differs between versions and builds of Python, so only losses on the same
    Python are comparable.

    Raises:
        FileNotFoundError: an error of `standard_library_files`.
    """
    return "\n\n".join(standard_library_files())

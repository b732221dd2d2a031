"""Text that every CPython carries, so that a first training needs no download."""

from __future__ import annotations

import sysconfig
import tokenize
from pathlib import Path

__all__ = ["documentation_pages", "documentation_text", "standard_library_files", "standard_library_text"]

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def documentation_pages() -> list[str]:
    """The pages that `documentation_text` is made of, in its order."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def documentation_text() -> str:
    """The documentation of the Python language that every CPython carries: about 450 kB of English."""
    return "\n\n".join(documentation_pages())


def standard_library_files() -> list[str]:
    """The files that `standard_library_text` is made of, in its order.

    Raises:
        FileNotFoundError: this Python has its standard library in no folder of source files.
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
        with tokenize.open(path) as file:  # in the encoding that the file declares
            texts.append(file.read())
    return texts


def standard_library_text() -> str:
    """The source code of the standard library of the CPython that runs, without its tests.

    About 12 MB in 3.11. It differs between versions and builds of Python: losses on it compare within one.

    Raises:
        FileNotFoundError: as `standard_library_files`.
    """
    return "\n\n".join(standard_library_files())

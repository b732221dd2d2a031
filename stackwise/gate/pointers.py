"""Pointers: small files in the place of data that git-lfs or git-annex has not fetched."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = ["check_pointers", "is_pointer"]

_BEGINS = (b"version https://git-lfs.github.com/spec/", b"/annex/objects/")
_LARGEST = 1024  # bytes
_SHOWN = 3


def is_pointer(path: Path) -> bool:
    """Return True if a file is a pointer of git-lfs or git-annex."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST:
        return False
    return path.read_bytes().startswith(_BEGINS)


def check_pointers(base: Path, head: Path, names: tuple[str, str], files: Iterable[Path]) -> tuple[str, ...]:
    """Return a note on the files that are pointers in both trees, or an empty tuple if no file is one.

    Args:
        base: tree of base.
        head: tree of head.
        names: names of base and head in messages.
        files: files to check, relative to the trees.

    Raises:
        ValueError: a file is a pointer in one tree and data in the other, so the sides would read different
            data.
    """
    pointers: list[str] = []
    for file in sorted(files):
        of_base, of_head = is_pointer(base / file), is_pointer(head / file)
        other = head if of_base else base
        if of_base != of_head and (other / file).exists():
            name = names[0] if of_base else names[1]
            raise ValueError(
                f"against: {file} is a pointer of git-lfs in the tree of {name} and data in the other; "
                "run `git lfs install`, and `git lfs fetch --all` or `git lfs pull`, and try again"
            )
        if of_base and of_head:
            pointers.append(str(file))
    if not pointers:
        return ()
    shown = ", ".join(pointers[:_SHOWN]) + (
        f" and {len(pointers) - _SHOWN} more" if pointers[_SHOWN:] else ""
    )
    return (f"pointers of git-lfs, not data, on both sides: {shown}; `git lfs pull` gets the data",)

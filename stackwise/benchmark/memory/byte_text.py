"""Bytes as text: in the unit in which a number of them is easy to read."""

from __future__ import annotations

__all__ = ["byte_text"]

_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def byte_text(size: float) -> str:
    """`size` in the largest unit of 1024 of which it holds one: "1.5 GiB"; below that in whole bytes."""
    for unit, scale in _UNITS:
        if abs(size) >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size:.0f} B"

"""Sample bytes: raw samples as the store keeps them: float64, lowest byte first, deflated by zlib."""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Sequence

__all__ = ["packed", "unpacked"]


def packed(samples: Sequence[float]) -> bytes:
    """Samples as bytes."""
    numbers = array("d", samples)
    if sys.byteorder == "big":
        numbers.byteswap()
    return zlib.compress(numbers.tobytes(), 1)


def unpacked(data: bytes) -> tuple[float, ...]:
    """Samples of bytes.

    Raises:
        ValueError: the bytes are damaged, which zlib's checksum shows.
    """
    try:
        plain = zlib.decompress(data)
    except zlib.error as error:
        raise ValueError(f"samples: {len(data)} bytes are damaged: {error}") from None
    numbers = array("d")
    numbers.frombytes(plain)
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)

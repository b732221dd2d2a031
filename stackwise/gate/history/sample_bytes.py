"""Sample bytes: storage format of raw samples: little-endian float64, compressed by zlib."""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Sequence

__all__ = ["packed", "unpacked"]


def packed(samples: Sequence[float]) -> bytes:
    """Encode samples as bytes."""
    numbers = array("d", samples)
    if sys.byteorder == "big":
        numbers.byteswap()
    return zlib.compress(numbers.tobytes(), 1)


def unpacked(data: bytes) -> tuple[float, ...]:
    """Decode samples from bytes.

    Raises:
        ValueError: the bytes are damaged, according to zlib's checksum.
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

"""A size in bytes, as people write it: "2 GiB"."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from stackwise.argument import require

__all__ = ["ALLOWED", "byte_size"]

_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate(("K" if suffix == "iB" else "k", "M", "G", "T"))
}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>[A-Za-z]+)", re.ASCII)

ALLOWED = (
    "a string such as '2 GiB': a number and one of B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB "
    "(of 1024), at least 1 B; or an integer >= 1, of bytes"
)


def byte_size(key: str, value: Any) -> int:
    """The bytes that `value` means; a fraction of a byte is cut off.

    Raises:
        ValueError: naming `key`, the value and what is allowed. A unit is exact, capitals too: "2 gb" and
            "2 Gb" may mean bits.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        require(value >= 1, key, value, ALLOWED)
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    require(match is not None and match["unit"] in _UNITS, key, value, ALLOWED)
    assert match is not None
    size = int(Fraction(match["number"]) * _UNITS[match["unit"]])
    require(size >= 1, key, value, ALLOWED)
    return size

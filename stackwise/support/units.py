"""Units: parse and print amounts of time and memory, such as "50us" and "2 GiB"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from stackwise.support.arguments import require

__all__ = ["byte_text", "parse_bytes", "parse_seconds", "time_text"]

_BYTE_UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate(("K" if suffix == "iB" else "k", "M", "G", "T"))
}
_SECOND_UNITS = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
}
_AMOUNT = re.compile(r"(?P<number>\d{1,30}(?:\.\d{1,30})?) ?(?P<unit>[A-Za-z]+)", re.ASCII)
_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def parse_bytes(key: str, value: Any, *, least: int = 1) -> int:
    """Return a number of bytes. A fraction of a byte is dropped.

    Args:
        key: name of the argument for the error.
        value: a string such as "2 GiB", or an integer.
        least: smallest number of bytes allowed.

    Raises:
        ValueError: another form, an unknown unit, or too few bytes. Units are case-sensitive, because
            "2 gb" and "2 Gb" may mean bits.
    """
    allowed = (
        "a string such as '2 GiB': a number and one of B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, "
        f"TiB (of 1024), at least {least} B; or an integer >= {least}, of bytes"
    )
    if isinstance(value, int) and not isinstance(value, bool):
        require(value >= least, key, value, allowed)
        return value
    match = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    require(match is not None and match["unit"] in _BYTE_UNITS, key, value, allowed)
    assert match is not None
    size = int(Fraction(match["number"]) * _BYTE_UNITS[match["unit"]])
    require(size >= least, key, value, allowed)
    return size


def parse_seconds(key: str, value: Any) -> float:
    """Return a time in seconds: 5e-05 for "50us".

    Args:
        key: name of the argument for the error.
        value: a number and one of ns, us, ms, s.

    Raises:
        ValueError: another form, or an unknown unit.
    """
    match = _AMOUNT.fullmatch(value) if isinstance(value, str) else None
    known = match is not None and match["unit"] in _SECOND_UNITS
    require(known, key, value, "a string such as '50us': a number and one of ns, us, ms, s")
    assert match is not None
    return float(Fraction(match["number"]) * _SECOND_UNITS[match["unit"]])


def byte_text(size: float) -> str:
    """Return a number of bytes with four digits and a binary unit: "1.5 GiB"."""
    return _text(size, _BYTES)


def time_text(seconds: float, digits: int = 4) -> str:
    """Return a time with `digits` digits and a unit from ns to s: "1.262 ms"."""
    return _text(seconds, _SECONDS, digits)


def _text(value: float, units: Sequence[tuple[float, str]], digits: int = 4) -> str:
    rounded = abs(float(f"{value:.{digits}g}"))  # 999.99 us would be 1000 us
    scale, unit = next((each for each in units if rounded >= each[0]), units[-1])
    return f"{value / scale:.{digits}g} {unit}"

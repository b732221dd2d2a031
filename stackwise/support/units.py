"""Units: parse and print amounts of time and memory, such as "50us" and "2 GiB"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from stackwise.support.arguments import require

__all__ = ["byte_text", "parse_bytes", "parse_seconds", "time_text"]

_BINARY = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
_DECIMAL = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_AMOUNT = re.compile(r"(?P<number>\d{1,30}(?:\.\d{1,30})?) ?(?P<unit>[A-Za-z]+)", re.ASCII)


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
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    size = value if is_integer else _amount(value, _BINARY | _DECIMAL)
    allowed = (
        "a string such as '2 GiB': a number and one of B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, "
        f"TiB (of 1024), at least {least} B; or an integer >= {least}, of bytes"
    )
    require(size is not None and int(size) >= least, key, value, allowed)
    assert size is not None
    return int(size)


def parse_seconds(key: str, value: Any) -> float:
    """Return a time in seconds: 5e-05 for "50us".

    Args:
        key: name of the argument for the error.
        value: a number and one of ns, us, ms, s.

    Raises:
        ValueError: another form, or an unknown unit.
    """
    seconds = _amount(value, _SECONDS)
    require(seconds is not None, key, value, "a string such as '50us': a number and one of ns, us, ms, s")
    return float(seconds or 0)


def byte_text(size: float) -> str:
    """Return a number of bytes with four digits and a binary unit: "1.5 GiB"."""
    return _text(size, _BINARY)


def time_text(seconds: float, digits: int = 4) -> str:
    """Return a time with `digits` digits and a unit from ns to s: "1.262 ms"."""
    return _text(seconds, _SECONDS, digits)


def _amount(text: Any, units: Mapping[str, float]) -> Fraction | None:
    """Return the exact amount, or None if the text has another form or unit."""
    match = _AMOUNT.fullmatch(text) if isinstance(text, str) else None
    if match is None or match["unit"] not in units:
        return None
    return Fraction(match["number"]) * Fraction(str(units[match["unit"]]))


def _text(value: float, units: Mapping[str, float], digits: int = 4) -> str:
    rounded = abs(float(f"{value:.{digits}g}"))  # 999.99 us would be 1000 us
    unit = next((unit for unit, scale in units.items() if rounded >= scale), [*units][-1])
    return f"{value / units[unit]:.{digits}g} {unit}"

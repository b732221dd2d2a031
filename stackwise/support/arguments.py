"""Arguments: checks that raise errors of one form, with the key, the value seen and the values allowed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["check_choice", "check_number", "check_range", "check_sizes", "require", "shown"]


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise an error about `value` unless `condition` is True.

    Raises:
        ValueError: "key: got value; allowed: ...". A long value is shortened in the middle.
    """
    if not condition:
        raise ValueError(f"{key}: got {shown(value)}; allowed: {allowed}")


def shown(value: object, most: int = 200) -> str:
    """Return the text of a value for an error, shortened in the middle to about `most` characters."""
    try:
        text = repr(value)
    except Exception as error:  # Python does not print integers of more than 4300 digits, nor very deep lists
        if isinstance(value, int) and isinstance(error, ValueError):
            return f"an integer of {value.bit_length()} bits"
        return type(value).__name__
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 4 :]}"


def check_sizes(minimum: int = 1, **sizes: Any) -> None:
    """Require integers >= `minimum`. A bool is not accepted."""
    for key, value in sizes.items():
        valid = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        require(valid, key, value, f"an integer >= {minimum}")


def check_range(noun: str, start: int, end: int | None, count: int) -> None:
    """Require that start <= end lie in 0 to `count`. None is the end."""
    require(0 <= start <= count, f"start {noun}", start, f"0 to {count}")
    require(end is None or start <= end <= count, f"end {noun}", end, f"{start} to {count}, or None")


def check_number(key: str, value: Any, allowed: str, holds: Callable[[float], bool]) -> None:
    """Require a finite number that fits a float and for which `holds` returns True."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_finite = is_number and abs(value) <= sys.float_info.max  # math.isfinite raises for huge integers
    require(is_finite and holds(value), key, value, allowed)


def check_choice(key: str, value: Any, choices: Iterable[str]) -> None:
    """Require one of `choices`."""
    choices = tuple(choices)
    require(isinstance(value, str) and value in choices, key, value, ", ".join(map(repr, choices)))

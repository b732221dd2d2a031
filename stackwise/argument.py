"""Arguments: refused in one form everywhere, with the key, the value seen and what is allowed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

_LONGEST = 200  # characters of a value in an error

__all__ = ["check_choice", "check_number", "check_range", "check_sizes", "require", "shown"]


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Refuse `value` unless `condition` holds.

    Raises:
        ValueError: "key: got value; allowed: ...". The middle of a long value is left out.
    """
    if not condition:
        raise ValueError(f"{key}: got {shown(value)}; allowed: {allowed}")


def shown(value: object) -> str:
    """Return the text of a value for an error, without the middle of a long one."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 4 :]}"


def check_sizes(minimum: int = 1, **sizes: Any) -> None:
    """Refuse what is no integer, or below `minimum`; a bool is no integer."""
    for key, value in sizes.items():
        sound = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        require(sound, key, value, f"an integer >= {minimum}")


def check_range(noun: str, start: int, end: int | None, count: int) -> None:
    """Refuse a range of `count` things that is not within them; the end is exclusive, None the last."""
    require(0 <= start <= count, f"start {noun}", start, f"0 to {count}")
    require(end is None or start <= end <= count, f"end {noun}", end, f"{start} to {count}, or None")


def check_number(key: str, value: Any, allowed: str, holds: Callable[[float], bool]) -> None:
    """Refuse any value but a finite number that a float can hold and for which `holds` is true."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    finite = number and abs(value) <= sys.float_info.max  # math.isfinite fails on huge integers
    require(finite and holds(value), key, value, allowed)


def check_choice(key: str, value: Any, choices: Iterable[str]) -> None:
    """Refuse what is none of `choices`."""
    choices = tuple(choices)
    require(isinstance(value, str) and value in choices, key, value, ", ".join(map(repr, choices)))

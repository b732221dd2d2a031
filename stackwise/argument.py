"""Arguments: refused in one form everywhere, with the key, the value seen and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["check_choice", "check_number", "check_range", "check_sizes", "require"]


def require(condition: bool, key: str, value: object, allowed: str) -> None:
    """Refuse `value` unless `condition` holds.

    Raises:
        ValueError: "key: got value; allowed: ...".
    """
    if not condition:
        raise ValueError(f"{key}: got {value!r}; allowed: {allowed}")


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
    """Refuse what is no finite number, or a number for which `holds` is false."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    require(number and holds(value), key, value, allowed)


def check_choice(key: str, value: Any, choices: Iterable[str]) -> None:
    """Refuse what is none of `choices`."""
    choices = tuple(choices)
    require(isinstance(value, str) and value in choices, key, value, ", ".join(map(repr, choices)))

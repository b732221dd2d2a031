"""Arguments: checks that raise errors of one form, with the key, the value seen and the values allowed."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from typing import Any

__all__ = [
    "check_choice",
    "check_fields",
    "check_flags",
    "check_functions",
    "check_number",
    "check_range",
    "check_sizes",
    "check_texts",
    "require",
    "shown",
]


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
    """Require 0 <= start <= end <= count. end=None means count."""
    require(0 <= start <= count, f"start {noun}", start, f"0 to {count}")
    require(end is None or start <= end <= count, f"end {noun}", end, f"{start} to {count}, or None")


def check_number(key: str, value: Any, allowed: str, holds: Callable[[float], bool]) -> None:
    """Require a finite number for which holds(value) is True."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_finite = is_number and abs(value) <= sys.float_info.max  # math.isfinite raises for huge integers
    require(is_finite and holds(value), key, value, allowed)


def check_choice(key: str, value: Any, choices: Iterable[str]) -> None:
    """Require one of `choices`."""
    choices = tuple(choices)
    require(isinstance(value, str) and value in choices, key, value, ", ".join(map(repr, choices)))


def check_flags(*, optional: bool = False, **flags: Any) -> None:
    """Require booleans, or also None if `optional`."""
    for key, value in flags.items():
        valid = isinstance(value, bool) or (optional and value is None)
        require(valid, key, value, "True, False or None" if optional else "True, False")


def check_texts(choices: Iterable[str] | None = None, **texts: Any) -> None:
    """Require tuples or lists of strings, which are in `choices` if given."""
    choices = None if choices is None else tuple(choices)
    allowed = "strings" if choices is None else ", ".join(map(repr, choices))
    for key, value in texts.items():
        valid = isinstance(value, tuple | list) and all(isinstance(text, str) for text in value)
        require(valid and (choices is None or {*value} <= {*choices}), key, value, f"a tuple of {allowed}")


def check_functions(**functions: Any) -> None:
    """Require functions or None."""
    for key, value in functions.items():
        require(value is None or callable(value), key, value, "a function or None")


def check_fields(owner: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Require names of fields.

    Raises:
        TypeError: an unknown name, with the closest field, or with all fields if none is close.
    """
    allowed = tuple(allowed)
    for name in given:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f"did you mean {near[0]}=?" if near else f"allowed: {', '.join(allowed)}"
            raise TypeError(f"{name}: unknown field of {owner}; {hint}")

"""Errors about arguments: the key, the value seen and the values allowed, in one line of readable length."""

import math
import re
from functools import partial

import pytest

from stackwise.config import ConfigError, StackWiseConfig
from stackwise.support.arguments import (
    check_choice,
    check_fields,
    check_flags,
    check_functions,
    check_number,
    check_range,
    check_sizes,
    check_texts,
    require,
)

HUGE = 10**5000  # Python does not print integers of more than 4300 digits
SHOWN = {
    "short": (5, "5"),
    "lines": ("a\nb", "'a\\nb'"),
    "long": ("x" * 300, "'" + "x" * 99 + " ... " + "x" * 49 + "'"),
    "integer": (HUGE, "an integer of 16610 bits"),
    "list": ([HUGE], "list"),
}
CHECKS = {
    "size": (lambda value: check_sizes(key=value), [1, 2**70], [0, -HUGE, 1.0, True, None, "1"]),
    "size from 0": (lambda value: check_sizes(0, key=value), [0, 1], [-1]),
    "number": (
        lambda value: check_number("key", value, "a number below 1", lambda number: number < 1),
        [0.5, 0, -7],
        [1, HUGE, math.nan, -math.inf, False, None, "0.5"],
    ),
    "choice": (lambda value: check_choice("key", value, ["a", "b"]), ["a", "b"], ["c", "A", "", None, 0, []]),
}


@pytest.mark.parametrize("value, shown", SHOWN.values(), ids=SHOWN)
def test_value_is_shown_in_readable_length(value, shown):
    with pytest.raises(ValueError) as refusal:
        require(False, "key", value, "less")
    assert str(refusal.value) == f"key: got {shown}; allowed: less"


@pytest.mark.parametrize(
    "check, value",
    [(check, value) for check, accepted, _ in CHECKS.values() for value in accepted],
    ids=lambda each: type(each).__name__,
)
def test_allowed_value_passes(check, value):
    check(value)


@pytest.mark.parametrize(
    "check, value",
    [(check, value) for check, _, refused in CHECKS.values() for value in refused],
    ids=lambda each: type(each).__name__,
)
def test_other_value_is_refused_with_its_key(check, value):
    with pytest.raises(ValueError, match=r"^key: got .*; allowed: "):
        check(value)


@pytest.mark.parametrize(
    "start, end, key",
    [
        (0, None, None),
        (0, 4, None),
        (4, 4, None),
        (5, None, "start"),
        (-1, 2, "start"),
        (2, 1, "end"),
        (0, 5, "end"),
    ],
)
def test_range_lies_within_the_count(start, end, key):
    if key is None:
        check_range("Block", start, end, 4)
    else:
        with pytest.raises(ValueError, match=f"^{key} Block: got"):
            check_range("Block", start, end, 4)


def test_configuration_refuses_an_integer_that_python_does_not_print():
    with pytest.raises(ConfigError, match=r"training\.max_steps: got .*allowed: less than"):
        StackWiseConfig.from_dict({"training": {"max_steps": HUGE}})


@pytest.mark.parametrize(
    ("check", "accepted", "refused", "allowed"),
    [
        (check_flags, [True, False], [None, 1, "no"], "True, False"),
        (partial(check_flags, optional=True), [True, None], [0, "no"], "True, False or None"),
        (check_texts, [(), ("a", "b"), ["a"]], ["a", ("a", 1), None], "a tuple of strings"),
        (partial(check_texts, ("x", "y")), [("x",), ()], [("z",), "x"], "a tuple of 'x', 'y'"),
        (check_functions, [None, len], [3, "len"], "a function or None"),
    ],
)
def test_value_of_a_field_is_checked(check, accepted, refused, allowed):
    for value in accepted:
        check(key=value)
    for value in refused:
        with pytest.raises(ValueError, match=re.escape(f"key: got {value!r}; allowed: {allowed}")):
            check(key=value)


def test_unknown_field_is_refused_with_the_closest_one():
    check_fields("Spec", ["width"], ["width", "name"])
    with pytest.raises(TypeError, match=r"widht: unknown field of Spec; did you mean width=\?"):
        check_fields("Spec", ["width", "widht"], ["width", "name"])
    with pytest.raises(TypeError, match="x: unknown field of Spec; allowed: width, name"):
        check_fields("Spec", ["x"], ["width", "name"])

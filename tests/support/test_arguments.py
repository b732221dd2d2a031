"""Errors about arguments: the key, the value seen and the values allowed, in one line of readable length."""

import pytest

from stackwise.config import ConfigError, StackWiseConfig
from stackwise.support.arguments import check_number, check_sizes, require

HUGE = 10**5000


@pytest.mark.parametrize(
    "value, seen",
    [
        (5, "5"),
        ("a\nb", "'a\\nb'"),
        ("x" * 300, "'" + "x" * 99 + " ... " + "x" * 49 + "'"),
        (HUGE, "an integer of 16610 bits"),
        ([HUGE], "list"),
    ],
    ids=["short", "lines", "long", "integer", "list"],
)
def test_value_is_shown_in_readable_length(value, seen):
    with pytest.raises(ValueError) as refusal:
        require(False, "key", value, "less")
    assert str(refusal.value) == f"key: got {seen}; allowed: less"


@pytest.mark.parametrize(
    "refuse",
    [
        lambda: check_sizes(key=-HUGE),
        lambda: check_number("key", HUGE, "a number below 1", lambda number: number < 1),
    ],
)
def test_integer_that_python_does_not_print_is_refused_by_name(refuse):
    with pytest.raises(ValueError, match="key: got an integer of 16610 bits"):
        refuse()


def test_configuration_refuses_an_integer_that_python_does_not_print():
    with pytest.raises(ConfigError, match=r"training\.max_steps: got .*allowed: less than"):
        StackWiseConfig.from_dict({"training": {"max_steps": HUGE}})

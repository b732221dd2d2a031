"""Rows for tables of keys: the values that a key accepts, and the values that it refuses."""

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import pytest

from stackwise.config import ConfigError, StackWiseConfig
from stackwise.config.section import Section


def sections(kind, path=""):
    """Return the class of every section of a configuration, by its path."""

    def parts(annotation):
        return [annotation, *(part for each in get_args(annotation) for part in parts(each))]

    found = {path: kind}
    for name, info in kind.model_fields.items():
        for part in parts(info.annotation):
            if isinstance(part, type) and issubclass(part, Section):
                found |= sections(part, f"{path}.{name}".lstrip("."))
    return found


LARGEST = 2**63 - 1
SECTIONS = sections(StackWiseConfig)


@dataclass(frozen=True)
class Key:
    """Values of one key.

    Attributes:
        accepted: values at the limits of the allowed range.
        refused: values, each with the words that the error must contain after "got <value>".
        given: other keys of the section with which the accepted values have an effect. Null needs none.
    """

    accepted: list[Any]
    refused: list[tuple[Any, tuple[str, ...]]]
    given: dict[str, Any] = field(default_factory=dict)

    def or_null(self):
        refused = [(value, words) for value, words in self.refused if value is not None]
        return replace(self, accepted=[*self.accepted, None], refused=refused)

    def accepts(self, *values):
        """Return the row with these accepted values, if the usual ones need other keys than `given`."""
        return replace(self, accepted=list(values))


def integer(least, *, most=None, **given):
    """Return the row of an integer, which must fit in 64 bits."""
    largest, above, limit = (LARGEST, 2**63, 2**63) if most is None else (most, most + 1, most)
    others = [(value, ("integer",)) for value in ("8", 8.0, True, None)]
    limits = [(least - 1, (str(least),)), (above, (str(limit),))]
    return Key([least, largest], [*others, *limits], given)


def number(*, least=None, above=None, most=None, below=None, **given):
    """Return the row of a finite number. A whole number is accepted."""
    accepted, limits = [1 if below is None else 0.5], []
    if least is not None:
        accepted, limits = [least, *accepted], [(least - 1e-9, least), (least - 1, least)]
    if above is not None:
        accepted, limits = [above + 1e-12, *accepted], [(above, above), (above - 1, above)]
    if most is not None:
        accepted, limits = [*accepted, most], [*limits, (most + 1e-9, most)]
    if below is not None:
        accepted, limits = [*accepted, below - 1e-9], [*limits, (below, below)]
    others = [(value, ("number",)) for value in ("1e-4", True, math.nan, math.inf, None)]
    return Key(accepted, [*others, *((value, (f"{limit:g}",)) for value, limit in limits)], given)


def choice(*values, **given):
    words = tuple(map(repr, values))
    wrong = ["", values[0].upper(), 0, None]
    return Key(list(values), [(value, words) for value in wrong], given)


def flag(**given):
    return Key([True, False], [(value, ("boolean",)) for value in (1, "true", None)], given)


def text(**given):
    wrong = [(value, ("string",)) for value in (0, b"a", None)]
    return Key(["", "no", "1e-4"], [*wrong, ("a\0b", ("without NUL",))], given)


def section():
    return Key([], [(value, ("dictionary",)) for value in ("x", [1], None)])


def acceptances(table):
    """Return test parameters (section, given, key, value) of a table {path of a section: {key: row}}."""
    return [
        pytest.param(SECTIONS[path], {} if value is None else row.given, key, value, id=_id(path, key, value))
        for path, rows in table.items()
        for key, row in rows.items()
        for value in row.accepted
    ]


def refusals(table):
    """Return test parameters (section, key, value, words) of a table {path of a section: {key: row}}."""
    return [
        pytest.param(SECTIONS[path], key, value, words, id=_id(path, key, value))
        for path, rows in table.items()
        for key, row in rows.items()
        for value, words in row.refused
    ]


def problems(kind, mapping):
    """Return the problems for which a section refuses a mapping."""
    with pytest.raises(ConfigError) as caught:
        kind.from_dict(mapping)
    return caught.value.problems


def assert_refused(lines, key, value, words):
    """Assert that the only problem names the key, the value seen and the values allowed."""
    [line] = lines
    seen, allowed = line.split("; ", 1)
    assert seen == f"{key}: got {value!r} ({type(value).__name__})"
    assert all(re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.])", allowed) for word in words), line


def same_values(given, found):
    """Return True if the nested values of `given` are in `found`."""
    return all(
        same_values(value, found[key]) if isinstance(value, dict) else found[key] == value
        for key, value in given.items()
    )


def _id(path, key, value):
    return f"{path}.{key}-{value!r}".lstrip(".")

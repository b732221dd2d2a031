"""Plain scalars are the numbers of YAML 1.2.2 (section 10.3.2), and text comes back as the text it was."""

import contextlib
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.config.yaml import dump_yaml, load_yaml, read_yaml

SCALARS = {
    "12": 12,
    "-3": -3,
    "010": 10,
    "1e-4": 1e-4,
    "3E+2": 300.0,
    ".5": 0.5,
    "-1.": -1.0,
    ".inf": math.inf,
    "-.inf": -math.inf,
    "1:30": "1:30",
    "1_000": "1_000",
    "0x10": "0x10",
    "1e": "1e",
    "true": True,
    "null": None,
    "": None,
}


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def nested(aliases, first):
    """A document whose every line repeats the one before it nine times: 9**12 values."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{i}: &a{i} {aliases.format(','.join([f'*a{i - 1}'] * 9))}" for i in range(1, 13)]
    return "\n".join(lines).encode()


@pytest.mark.parametrize("text, value", SCALARS.items())
def test_plain_scalar(text, value):
    found = load_yaml(text.encode())
    assert (type(found), found) == (type(value), value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=8,
    )
)
def test_round_trip(value):
    assert load_yaml(dump_yaml(value).encode()) == value


@pytest.mark.parametrize(
    "content", [b"a: 1\na: 2", b"\xff\xfe", b"[", b"!!python/object/apply:os.getcwd []", b"!!int ''"]
)
def test_refused(content):
    with pytest.raises(ValueError):
        load_yaml(content)


@pytest.mark.parametrize(
    "content, message",
    [
        (nested("[{}]", "x"), "expands to more than 10,000 values, line 6"),
        (nested("{{<<: [{}]}}", "{k: 1}"), "expands to more than 10,000 values, line 5"),
        (b"[" * 10_000 + b"]" * 10_000, "nested deeper than 50 levels, line 1"),
        (b"- &c0 [1]\n" + b"".join(b"- &c%d [*c%d]\n" % (i + 1, i) for i in range(900)), "deeper than 50"),
        (b"&a [*a]", "a value contains itself, line 1"),
        (b"&a {x: *a}", "a value contains itself, line 1"),
        (b"x: 1\na: " + b"9" * 5000, "number of 5000 characters, line 2; allowed: 300"),
        (b"? " + b"9" * 5000 + b"\n: 1", "number of 5000 characters, line 1; allowed: 300"),
        (b'a: "x\\0y"', "text with a NUL character, line 1"),
        (b"a: " + b"x" * 2_000_000, "longer than 1,000,000 bytes"),
    ],
    ids=["aliases", "merge keys", "depth", "chain", "list", "mapping", "digits", "key", "NUL", "bytes"],
)
def test_document_beyond_limits_is_refused_in_one_line(content, message):
    with pytest.raises(ValueError, match=message) as refusal:
        load_yaml(content)
    assert "\n" not in str(refusal.value)


@given(st.binary(max_size=60) | st.text("[]{}&*a:<!|>-?0. \n\"'", max_size=60).map(str.encode))
def test_any_content_is_a_value_or_a_value_error(content):
    with contextlib.suppress(ValueError):
        load_yaml(content)


def test_file_is_not_read_beyond_the_limit():
    with pytest.raises(ValueError, match="longer than"):
        read_yaml(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("scalar", "kind"),
    [
        ("!!timestamp foo", "timestamp"),
        ("2026-99-99", "timestamp"),
        ("!!int a", "int"),
        ("!!float b", "float"),
    ],
)
def test_scalar_of_another_type_is_refused_with_its_line(scalar, kind):
    value = scalar.rpartition(" ")[2]
    with pytest.raises(ValueError, match=rf"^line 2: got '{value}'; allowed: a value of type {kind}$"):
        load_yaml(f"a: 1\nx: {scalar}\n".encode())

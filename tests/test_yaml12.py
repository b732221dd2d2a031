"""Plain scalars are the numbers of YAML 1.2.2 (section 10.3.2), and text comes back as the text it was."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.yaml12 import dump_yaml, load_yaml

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


@pytest.mark.parametrize("text, value", SCALARS.items())
def test_plain_scalar(text, value):
    found = load_yaml(text.encode())
    assert (type(found), found) == (type(value), value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
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

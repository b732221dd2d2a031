"""Values that are handed over between processes."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stackwise.quality.sandbox.plain import LARGEST, NotPlainError, Shared, decode, encode, pack, unpack

KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.floats(allow_nan=False))
VALUES = st.recursive(
    st.one_of(KEYS, st.floats(), st.complex_numbers(), st.binary().map(bytearray)),
    lambda each: st.one_of(
        st.lists(each),
        st.lists(each).map(tuple),
        st.sets(KEYS),
        st.frozensets(KEYS),
        st.dictionaries(KEYS, each),
    ),
    max_leaves=20,
)


def reader(data):
    place = [0]

    def read(size):
        part = data[place[0] : place[0] + max(1, size // 2)]
        place[0] += len(part)
        return part

    return read


def same(one, other):
    """Equal and of the same types, all the way down; NaN is itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return all(map(same, one, other)) and all(map(same, one.values(), other.values()))
    return one == other


@given(VALUES)
def test_arrives_as_it_was(value):
    message = unpack(reader(pack({"value": encode(value)})))
    assert same(decode(message["value"]), value)


@pytest.mark.parametrize(
    "value",
    [object(), len, {"a": object()}, [lambda: 0], {1: [{2: (set, 1)}]}, memoryview(b"a"), type],
)
def test_nothing_else_is_handed_over(value):
    with pytest.raises(NotPlainError, match="cannot be handed over"):
        encode(value)


def test_what_is_written_twice_arrives_as_one():
    inner = {"a": bytearray(b"x")}
    found = decode(encode([inner, (inner, inner["a"]), {1}, {1}]))
    assert found == [inner, (inner, inner["a"]), {1}, {1}]
    assert found[1][0] is found[0] and found[1][1] is found[0]["a"] and found[2] is not found[3]


@settings(max_examples=30)
@given(st.lists(VALUES, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_both_ends_of_a_conversation_number_alike(values, random):
    here, there = Shared(), Shared()
    for value in values:
        decode(encode(value, here), there)
    assert len(here.objects) == len(there.objects)
    if here.objects:
        place = random.randrange(len(here.objects))
        assert decode(encode(here.objects[place], here), there) is there.objects[place]


def test_too_deep():
    value = []
    for _ in range(200):
        value = [value]
    with pytest.raises(NotPlainError, match="more than 100 times"):
        encode(value)


def test_of_a_subclass_what_it_holds():
    class Odd(int):
        __eq__ = lambda *_: True  # noqa: E731
        __hash__ = int.__hash__
        __index__ = lambda _: 7  # noqa: E731

    class Names(dict):
        items = lambda _: [("x", 1)]  # noqa: E731

    found = decode(encode([Odd(3), Names(a=1), type("Text", (str,), {"__str__": lambda _: "no"})("yes")]))
    assert found == [3, {"a": 1}, "yes"]
    assert [type(each) for each in found] == [int, dict, str]


@pytest.mark.parametrize(
    "data",
    [
        1,
        1.5,
        [],
        {},
        {"a": 1, "b": 2},
        {"code": "1"},
        {"int": "xyz"},
        {"int": 1},
        {"float": "one"},
        {"dict": [[{"list": []}, None]]},
        {"dict": 3},
        {"set": [{"list": []}]},
        {"bytes": "0g"},
        {"range": ["a"]},
        {"list": "abc"},
        {"same": 0},
        {"same": "a"},
        {"list": [{"list": []}, {"same": 1}]},
        {"complex": ["0x1p0"]},
    ],
)
def test_what_is_no_value(data):
    with pytest.raises(NotPlainError):
        decode(data)


def test_messages():
    assert unpack(reader(b"")) is None
    assert unpack(reader(pack({"a": 1})[:-1])) is None
    with pytest.raises(NotPlainError, match="allowed"):
        unpack(reader(b"\xff" * 4))
    for body in (b"spam", b"[1]", b"[" * 100_000):
        with pytest.raises(NotPlainError, match="no message"):
            unpack(reader(len(body).to_bytes(4, "big") + body))
    with pytest.raises(NotPlainError, match=f"allowed: {LARGEST}"):
        pack({"a": "x" * (LARGEST + 1)})

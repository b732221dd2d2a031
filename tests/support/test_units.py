"""Amounts of memory and time: their text, how they are read, and the texts that are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.support.units import byte_text, parse_bytes, parse_seconds, time_text

NO_SIZES = ["", "2", "GiB", "2 gib", "2 gb", "2 Gb", "2 KB", "2 GiB ", " 2 GiB", "2  GiB", "-2 GiB", "+2 GiB"]
NO_SIZES += ["2,5 GiB", "1e3 B", ".5 GiB", "5. GiB", "2 GiBs", "0 GiB", "0.5 B", "\uff12 GiB", "nan B"]
NO_SIZES += ["2\nGiB", 0, -1, 2.0, True, None, b"2 GiB"]
NO_TIMES = ["50", 50, "50 µs", "50 min", "-1us", None, "us"]


@pytest.mark.parametrize(
    "size, text",
    [
        (0, "0 B"),
        (0.4, "0.4 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1 MiB"),
        (10_000_000, "9.537 MiB"),
        (2**30, "1 GiB"),
        (2**40 - 2**30, "1023 GiB"),
        (2**40, "1 TiB"),
        (2**52, "4096 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_size_has_four_digits_and_a_binary_unit(size, text):
    assert byte_text(size) == text


@pytest.mark.parametrize(
    "seconds, digits, text",
    [
        (0, 4, "0 ns"),
        (3e-10, 4, "0.3 ns"),
        (1e-6, 4, "1 us"),
        (2e-6, 4, "2 us"),
        (999.94e-6, 4, "999.9 us"),
        (999.96e-6, 4, "1 ms"),
        (999.9876e-6, 5, "999.99 us"),
        (999.9876e-6, 7, "999.9876 us"),
        (0.0012624, 4, "1.262 ms"),
        (-0.02, 4, "-20 ms"),
        (1, 4, "1 s"),
        (3600, 4, "3600 s"),
    ],
)
def test_time_has_the_unit_of_its_rounded_value(seconds, digits, text):
    assert time_text(seconds, digits) == text


@pytest.mark.parametrize(
    "text, size",
    [
        ("1 B", 1),
        ("300B", 300),
        ("2 kB", 2_000),
        ("2 MB", 2_000_000),
        ("1.5 GB", 1_500_000_000),
        ("1 TB", 1_000_000_000_000),
        ("1 KiB", 1_024),
        ("3MiB", 3_145_728),
        ("2 GiB", 2_147_483_648),
        ("0.5 TiB", 549_755_813_888),
        ("0.1 KiB", 102),
        (4096, 4096),
        (1, 1),
    ],
)
def test_size_is_read_in_any_unit(text, size):
    assert parse_bytes("limit", text) == size


@pytest.mark.parametrize(
    "text, seconds", [("50us", 5e-5), ("1.5 ms", 1.5e-3), ("2s", 2.0), ("10ns", 1e-8), ("0us", 0.0)]
)
def test_time_is_read_in_any_unit(text, seconds):
    assert parse_seconds("floor", text) == seconds


@given(st.integers(1, 2**50))
def test_size_is_read_from_its_text(size):
    assert parse_bytes("limit", byte_text(size)) == pytest.approx(size, rel=1e-3)


REFUSED = [
    *((parse_bytes, value, ("'2 GiB'", "KiB, MiB, GiB, TiB (of 1024)")) for value in NO_SIZES),
    *((parse_seconds, value, ("'50us'", "ns, us, ms, s")) for value in NO_TIMES),
]


@pytest.mark.parametrize("parse, value, allowed", REFUSED, ids=[repr(value) for _, value, _ in REFUSED])
def test_other_text_is_refused_with_the_units(parse, value, allowed):
    with pytest.raises(ValueError) as error:
        parse("limit", value)
    assert str(error.value).startswith(f"limit: got {value!r}; allowed: a string such as ")
    assert all(words in str(error.value) for words in allowed)


@pytest.mark.parametrize("least, value", [(0, 0), (0, "0 B"), (1024, "1 KiB"), (1024, 1024)])
def test_size_may_be_the_least_one(least, value):
    assert parse_bytes("limit", value, least=least) == least

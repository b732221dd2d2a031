"""Amounts: every unit, its borders as text, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.support.units import byte_text, parse_bytes, parse_seconds, time_text


@pytest.mark.parametrize(
    ("size", "text"),
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
def test_bytes(size, text):
    assert byte_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ns"),
        (3e-10, "0.3 ns"),
        (2e-6, "2 us"),
        (999.94e-6, "999.9 us"),
        (999.96e-6, "1 ms"),
        (0.0012624, "1.262 ms"),
        (-0.02, "-20 ms"),
        (1, "1 s"),
        (3600, "3600 s"),
    ],
)
def test_seconds(seconds, text):
    assert time_text(seconds) == text


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
def test_sizes_are_read(text, size):
    assert parse_bytes("limit", text) == size


@pytest.mark.parametrize(
    "value",
    [
        *("", "2", "GiB", "2 gib", "2 gb", "2 Gb", "2 KB", "2 GiB ", " 2 GiB", "2  GiB", "-2 GiB", "+2 GiB"),
        *(
            "2,5 GiB",
            "1e3 B",
            ".5 GiB",
            "5. GiB",
            "2 GiBs",
            "0 GiB",
            "0.5 B",
            "\uff12 GiB",
            "nan B",
            "2\nGiB",
        ),
        *(0, -1, 2.0, True, None, b"2 GiB"),
    ],
    ids=repr,
)
def test_what_is_no_size_is_refused(value):
    with pytest.raises(ValueError) as error:
        parse_bytes("limit", value)
    assert str(error.value).startswith(f"limit: got {value!r}; allowed: a string such as '2 GiB'")
    assert "KiB, MiB, GiB, TiB (of 1024)" in str(error.value)


@pytest.mark.parametrize(("digits", "text"), [(4, "1 ms"), (5, "999.99 us"), (7, "999.9876 us")])
def test_a_time_with_more_digits(digits, text):
    """In the unit that it has with so many."""
    assert time_text(999.9876e-6, digits) == text


@given(st.integers(1, 2**50))
def test_text_of_a_size_means_that_size(size):
    assert parse_bytes("limit", byte_text(size)) == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "seconds"), [("50us", 5e-5), ("1.5 ms", 1.5e-3), ("2s", 2.0), ("10ns", 1e-8), ("0us", 0.0)]
)
def test_a_time(text, seconds):
    assert parse_seconds("floor", text) == seconds


@pytest.mark.parametrize("value", ["50", 50, "50 µs", "50 min", "-1us", None, "us"], ids=repr)
def test_what_is_no_time_is_refused(value):
    with pytest.raises(ValueError, match=r"floor: got .*; allowed: a string such as '50us'"):
        parse_seconds("floor", value)

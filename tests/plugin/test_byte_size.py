"""Sizes in bytes: every unit, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_stackwise.byte_size import byte_size
from stackwise.benchmark.memory.byte_text import byte_text


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
def test_sizes(text, size):
    assert byte_size("limit", text) == size


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
def test_anything_else_is_refused(value):
    with pytest.raises(ValueError) as error:
        byte_size("limit", value)
    assert str(error.value).startswith(f"limit: got {value!r}; allowed: a string such as '2 GiB'")
    assert "KiB, MiB, GiB, TiB (of 1024)" in str(error.value)


@given(st.integers(1, 2**50))
def test_text_of_a_size_means_that_size(size):
    assert byte_size("limit", byte_text(size)) == pytest.approx(size, rel=1e-3)

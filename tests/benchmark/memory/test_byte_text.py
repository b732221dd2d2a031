"""Bytes as text, at the borders of their units."""

import pytest

from stackwise.benchmark.memory.byte_text import byte_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (0.4, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (10_000_000, "9.537 MiB"),
        (2**30, "1 GiB"),
        (2**40 - 2**30, "1023 GiB"),
        (2**40, "1 TiB"),
        (2**52, "4096 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_text(size, text):
    assert byte_text(size) == text

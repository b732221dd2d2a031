"""Samples as bytes: the same numbers again, on any machine, or an error."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.gate.history.sample_bytes import packed, unpacked


@given(st.lists(st.floats(allow_nan=False)))
def test_the_same_numbers_again(samples):
    data = packed(samples)
    assert unpacked(data) == tuple(samples)
    assert zlib.decompress(data) == struct.pack(f"<{len(samples)}d", *samples)


@given(st.binary(max_size=40))
def test_other_bytes_are_told(data):
    with pytest.raises(ValueError, match="damaged"):
        unpacked(b"\0" + data)

"""Kinds of attention, by length: a forward pass of a Rack of each."""

import pytest

from bench.racks import ATTENTION, PEAK, rack_of, sizes

SIZES = sizes(
    [{"batch_size": 1, "seq_len": length} for length in (256, 1024, 4096)],
    [{"batch_size": 1, "seq_len": length} for length in (2048, 16384)],
)


@pytest.mark.benchmark(group="attention")
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(("shape", "size"), SIZES)
def test_attention(throughput, shape, size, attention):
    throughput(rack_of(shape, attention), mode="forward", min_seconds=2.0, peak=PEAK, **size)

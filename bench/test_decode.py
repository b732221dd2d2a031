"""Decoding: one token for each row behind a context, by batch and context."""

import pytest

from bench.racks import PEAK, rack_of, sizes

SIZES = sizes(
    [
        {"batch_size": 1, "seq_len": 128},
        {"batch_size": 1, "seq_len": 1024},
        {"batch_size": 8, "seq_len": 128},
    ],
    [{"batch_size": 1, "seq_len": 2048}, {"batch_size": 32, "seq_len": 2048}],
)


@pytest.mark.benchmark(group="decode")
@pytest.mark.parametrize("attention", ["mha", "gqa", "mla", "elu"])
@pytest.mark.parametrize(("shape", "size"), SIZES)
def test_decode(throughput, shape, size, attention):
    throughput(rack_of(shape, attention), mode="decode", min_seconds=2.0, peak=PEAK, **size)

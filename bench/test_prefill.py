"""Prefill: a prompt into an empty cache, by length."""

import pytest

from bench.racks import PEAK, rack_of, sizes

SIZES = sizes(
    [{"batch_size": 1, "seq_len": length} for length in (128, 512, 2048)],
    [{"batch_size": 1, "seq_len": length} for length in (512, 4096, 32768)],
)


@pytest.mark.benchmark(group="prefill")
@pytest.mark.parametrize(("shape", "size"), SIZES)
def test_prefill(throughput, shape, size):
    throughput(rack_of(shape), mode="prefill", min_seconds=2.0, peak=PEAK, **size)

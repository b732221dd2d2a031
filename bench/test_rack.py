"""Throughput of our own Rack: forward pass and training step, by shape.

`pytest bench` measures on the CPU, `pytest bench --gpu` on CUDA with larger shapes.
"""

import pytest

from stackwise import ModelSpec, create_simple_rack

SMALL = ModelSpec.of(
    lambda: create_simple_rack(2, 3, d_model=384, d_ff=1024, n_heads=6, n_kv_heads=2, vocab_size=8192),
    name="rack-14M",
)


@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize(("batch_size", "seq_len"), [(2, 256), (8, 256), (4, 1024)])
@pytest.mark.benchmark(group="rack")
def test_rack(throughput, mode, batch_size, seq_len):
    throughput(SMALL, mode=mode, batch_size=batch_size, seq_len=seq_len, min_seconds=3.0)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["forward", "train"])
@pytest.mark.parametrize(("batch_size", "seq_len"), [(32, 1024), (8, 4096)])
@pytest.mark.benchmark(group="rack-gpu")
def test_rack_on_gpu(throughput, mode, batch_size, seq_len):
    throughput(SMALL, mode=mode, batch_size=batch_size, seq_len=seq_len, min_seconds=3.0)

"""Training steps, by batch, length and precision: ours, and a Llama of transformers of the same shape."""

import pytest

from bench import peer_models
from bench.racks import PEAK, rack_of, sizes
from stackwise import ModelSpec

SIZES = sizes(
    [
        {"batch_size": 2, "seq_len": 256},
        {"batch_size": 8, "seq_len": 256},
        {"batch_size": 4, "seq_len": 1024},
    ],
    [{"batch_size": 8, "seq_len": 2048}, {"batch_size": 2, "seq_len": 8192}],
)


@pytest.mark.benchmark(group="training")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "size"), SIZES)
def test_rack(throughput, shape, size, dtype):
    throughput(rack_of(shape), mode="train", dtype=dtype, min_seconds=3.0, peak=PEAK, **size)


@pytest.mark.benchmark(group="training")
@pytest.mark.parametrize(("shape", "size"), SIZES)
def test_llama_of_transformers(throughput, shape, size):
    pytest.importorskip("transformers")
    llama = ModelSpec.of(lambda: peer_models.transformers(shape)[0], name="llama")
    throughput(llama, mode="train", min_seconds=3.0, peak=PEAK, **size)

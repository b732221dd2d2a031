"""The least time of work: arithmetic, and decoding of a known model by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from stackwise.benchmark.flops.peak_rate import PeakRate
from stackwise.benchmark.flops.roofline import decode_floor, roofline
from stackwise.benchmark.flops.transformer_shape import TransformerShape

H200 = PeakRate("NVIDIA H200", "published", {"bfloat16": 989.5e12}, 4.8e12, {})


@pytest.mark.parametrize(
    "flops, moved, seconds, bound",
    [(100, 10, 10.0, "compute"), (100, 40, 20.0, "memory"), (100, 20, 10.0, "memory")],
)
def test_the_longer_of_the_two(flops, moved, seconds, bound):
    floor = roofline(flops, moved, peak=10.0, bandwidth=2.0)
    assert (floor.seconds, floor.bound, floor.intensity) == (seconds, bound, flops / moved)
    assert floor.to_dict() == {
        "flops": flops,
        "moved": moved,
        "compute_seconds": flops / 10,
        "memory_seconds": moved / 2,
        "seconds": seconds,
        "bound": bound,
        "intensity": flops / moved,
    }


def llama_8b():
    return TransformerShape.uniform(
        n_layers=32, d_model=4096, n_heads=32, n_kv_heads=8, d_ff=14336, vocab_size=128256
    )


def test_decoding_reads_weights_and_cache():
    floor = decode_floor(llama_8b(), batch_size=1, seq_len=1024, peak=H200, dtype=torch.bfloat16)
    # 8.03 billion parameters, less 65 norms, and of the embedding one row.
    weights = 8_030_261_248 - 65 * 4096 - 128256 * 4096 + 4096
    token = 32 * 2 * 8 * 128
    assert floor.moved == 2 * (weights + 1025 * token)
    assert floor.bound == "memory"
    assert floor.seconds == floor.moved / 4.8e12
    # Each weight is multiplied once and read as two bytes: about one operation a byte.
    assert floor.intensity == pytest.approx(1.0, rel=0.05)


def test_many_rows_are_bound_by_arithmetic():
    shape = llama_8b()
    one, many = (
        decode_floor(shape, batch_size=n, seq_len=1, peak=H200, dtype=torch.bfloat16) for n in (1, 1024)
    )
    assert (one.bound, many.bound) == ("memory", "compute")
    assert many.flops == 1024 * one.flops


@pytest.mark.parametrize(
    "changed",
    [
        {"peak": None},
        {"peak": replace(H200, bandwidth=None)},
        {"dtype": torch.float32},
        {"model": nn.Linear(2, 2)},
    ],
)
def test_none_where_a_part_is_not_known(changed):
    arguments = {"model": llama_8b(), "peak": H200, "dtype": torch.bfloat16, **changed}
    assert decode_floor(arguments.pop("model"), batch_size=1, seq_len=4, **arguments) is None


@pytest.mark.parametrize("key", ["flops", "moved", "peak", "bandwidth"])
def test_what_is_refused(key):
    numbers = {"flops": 1, "moved": 1, "peak": 1.0, "bandwidth": 1.0, key: 0}
    with pytest.raises(ValueError, match=f"{key}: got 0"):
        roofline(numbers["flops"], numbers["moved"], peak=numbers["peak"], bandwidth=numbers["bandwidth"])

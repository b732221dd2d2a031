"""What bench.gpu counts and times, on a Rack that the CPU can take."""

import dataclasses
import functools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.claim import Claim
from bench.gpu import (
    DECODING,
    PARTS,
    TRAINING,
    Size,
    flops_per_token,
    measure_decoding,
    measure_overhead,
    measure_training,
    peak_flops,
)
from bench.peer_models import Shape
from stackwise.model.backend import using
from stackwise.training.objective import next_token_loss

CPU = torch.device("cpu")
TINY = Size("tiny", 32, 2, 2, 2, 96, 64, 2, 8, 0.5)


def test_flops_are_those_that_torch_counts():
    size = dataclasses.replace(TINY, d_model=64, d_ff=192, vocab_size=512, seq_len=64)
    rack = size.build(CPU)
    ids = torch.randint(size.vocab_size, (size.batch_size, size.seq_len + 1))
    with using("math"), FlopCounterMode(display=False) as counter:
        next_token_loss(rack, {"input_ids": ids}).backward()
    # Norm gains and the count's full, not lower-triangular, attention aside.
    expected = flops_per_token(rack, size) * size.batch_size * size.seq_len
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("size", [*TRAINING, *DECODING], ids=lambda size: size.name)
def test_sizes_are_what_their_names_say(size):
    with torch.device("meta"):
        n_parameters = sum(p.numel() for p in size.build(torch.device("meta")).parameters())
    said = size.name.partition("/")[0]
    unit = {"M": 1e6, "B": 1e9}[said[-1]]
    assert n_parameters / (float(said[:-1]) * unit) == pytest.approx(1.0, rel=0.25)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_rates_are_work_over_time(monkeypatch, backend):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    size = dataclasses.replace(TINY, n_layers=1)
    training = measure_training(size, CPU, steps=2)
    assert len(training["seconds"]) == 2
    assert training["flops_per_second"] > 0
    decoding = measure_decoding(size, CPU, n_new=3, rounds=2, copied_bytes=1024)
    assert len(decoding["seconds"]) == 2
    assert decoding["bytes_per_second"] > 0


def test_overhead_times_each_step():
    seconds = measure_overhead(Shape(32, 2, 2, 2, 96, 64, 2, 8), CPU, rounds=3, compile=False)
    assert {name: len(each) for name, each in seconds.items()} == dict.fromkeys(
        ("plain", "guarded", "loop", "monitored", "items"), 3
    )


@pytest.mark.parametrize("part", PARTS)
def test_without_a_gpu_nothing_is_claimed(part, tmp_path, monkeypatch):
    monkeypatch.setattr("bench.claim.RESULTS", tmp_path)
    claim = Claim("gpu", quick=True)
    PARTS[part](claim, None)
    assert {bar.verdict for bar in claim.bars} == {"NOT MEASURED"}
    assert not claim.figures


def test_a_card_without_a_known_peak_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GeForce 256")
    with pytest.raises(KeyError, match="GeForce 256"):
        peak_flops(torch.device("cuda"))

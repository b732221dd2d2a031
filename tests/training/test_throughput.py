"""ThroughputMeter by the test's own clock, and memory of a process."""

import subprocess
import sys

import pytest
import torch

from stackwise.training.throughput import (
    Throughput,
    ThroughputMeter,
    peak_memory_so_far,
)

CPU = torch.device("cpu")


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_pause_takes_no_time(clock):
    meter = ThroughputMeter(CPU, clock=clock)
    clock.now += 10
    meter.count(100)
    meter.read()
    with meter.paused():
        clock.now += 1000
    clock.now += 10
    meter.count(100)
    figures = meter.read()
    assert (figures.seconds, figures.tokens_per_second, figures.mean_tokens_per_second) == (20, 10, 10)


def test_recent_rate_and_that_of_the_run(clock):
    meter = ThroughputMeter(CPU, window=2, clock=clock)
    for seconds, tokens in ((10, 100), (1, 100), (1, 300)):
        clock.now += seconds
        for _ in range(tokens // 50):  # records come many at a time
            meter.count(50)
        figures = meter.read()
    assert (figures.total_tokens, figures.seconds) == (500, 12.0)
    assert figures.tokens_per_second == 400 / 2
    assert figures.mean_tokens_per_second == 500 / 12


def test_share_of_waiting(clock):
    meter = ThroughputMeter(CPU, clock=clock)

    def batches():
        for batch in range(3):
            clock.now += 1  # to come
            yield batch
        clock.now += 1  # to find out that there are no more

    seen = []
    for batch in meter.waiting(batches()):
        clock.now += 3  # to train
        seen.append(batch)
    assert seen == [0, 1, 2]
    assert meter.read().data_wait_share == 4 / 13


def test_waiting_is_counted_where_data_fail(clock):
    meter = ThroughputMeter(CPU, clock=clock)

    def fails():
        clock.now += 5
        yield from ()
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(meter.waiting(fails()))
    assert meter.read().data_wait_share == 1.0


def test_utilisation(clock):
    meter = ThroughputMeter(CPU, flops_per_token=6e9, peak_flops=1e15, clock=clock)
    clock.now += 2
    meter.count(100_000)
    assert meter.read().mfu == pytest.approx(50_000 * 6e9 / 1e15)


@pytest.mark.parametrize("known", [{}, {"flops_per_token": 6e9}, {"peak_flops": 1e15}])
def test_utilisation_that_is_not_known(clock, known):
    figures = ThroughputMeter(CPU, clock=clock, **known).read()
    assert figures.mfu is None
    assert "mfu" not in figures.to_dict()


def test_before_anything_happened(clock):
    figures = ThroughputMeter(CPU, clock=clock).read()
    assert figures == Throughput(0, 0.0, 0.0, 0.0, None, 0.0, figures.peak_memory_bytes)


def test_begin_anew(clock):
    meter = ThroughputMeter(CPU, clock=clock)
    clock.now += 60
    meter.count(1)
    meter.start()
    clock.now += 2
    meter.count(10)
    figures = meter.read()
    assert (figures.total_tokens, figures.seconds, figures.tokens_per_second) == (10, 2.0, 5.0)


def test_window_of_none():
    with pytest.raises(ValueError, match="window: got 0"):
        ThroughputMeter(CPU, window=0)


PEAK = """
import torch
from stackwise.training.throughput import peak_memory_so_far
before = peak_memory_so_far(torch.device("cpu"))
held = bytearray(200_000_000)
held[::4096] = b"x" * len(held[::4096])
del held
after = peak_memory_so_far(torch.device("cpu"))
print(before, after)
"""


@pytest.mark.slow
def test_peak_of_a_process_of_its_own():
    ballast = bytearray(50_000_000)
    out = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout
    before, after = map(int, out.split())
    del ballast
    assert 190e6 <= after - before <= 220e6


def test_peak_never_falls():
    first = peak_memory_so_far(CPU)
    assert 10e6 < first <= peak_memory_so_far(CPU)


def test_device_of_another_kind():
    with pytest.raises(ValueError, match="device: got 'meta'; allowed: cpu, cuda"):
        peak_memory_so_far(torch.device("meta"))


@pytest.mark.gpu
def test_peak_of_tensors():
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats()
    before = peak_memory_so_far(device)
    held = torch.zeros(2**24, device=device)
    del held
    assert peak_memory_so_far(device) >= before + 2**26

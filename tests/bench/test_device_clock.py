"""bench.clock on a GPU that is played: what it holds the events against, and how far they are apart."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from bench import claim as claim_module
from bench import clock
from bench.claim import Claim

CUDA = torch.device("cuda")


@pytest.fixture
def claim(monkeypatch, tmp_path):
    monkeypatch.setattr(claim_module, "RESULTS", tmp_path)
    return Claim("clock", quick=True)


@pytest.fixture
def profiled(monkeypatch):
    """CUPTI tells of each launch of `launch` so many microseconds, beside what is no such kernel."""
    launched = []

    @contextmanager
    def profile(activities):
        launched.clear()
        others = [
            event("spin_kernel", 5.0, DeviceType.CPU),  # its launch
            event("Memset (Device)", 7.0, DeviceType.CUDA),
        ]
        yield SimpleNamespace(events=lambda: [*launched, *others])

    def event(name, microseconds, kind):
        time_range = SimpleNamespace(elapsed_us=lambda: microseconds)
        return SimpleNamespace(name=name, device_type=kind, time_range=time_range)

    monkeypatch.setattr(clock, "profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return lambda microseconds: launched.append(
        event("at::cuda::spin_kernel(long)", microseconds, DeviceType.CUDA)
    )


def test_seconds_are_those_that_cupti_tells(profiled):
    times = iter([20.0, 21.0, 22.5])
    found = clock.kernel_seconds(lambda: profiled(next(times)), CUDA, 3)
    assert found == pytest.approx([20e-6, 21e-6, 22.5e-6])


def test_where_cupti_does_not_tell_of_each(profiled):
    with pytest.raises(RuntimeError, match="CUPTI told of 0 kernels where 4 were launched"):
        clock.kernel_seconds(lambda: None, CUDA, 4)


@pytest.mark.parametrize(("factor", "verdict"), [(1.002, "PASS"), (1.03, "SHORT"), (0.9, "SHORT")])
def test_events_are_held_against_another_clock(claim, monkeypatch, factor, verdict):
    """A wrong rate of cycles makes another kernel and no error: both clocks are asked of the same."""

    class Events:
        notes = ()

        def __init__(self, device):
            pass

        def learn(self, call):
            return 6

        def sample(self, call, count, repeats=1):
            return [20e-6 * factor] * count

    monkeypatch.setattr(clock, "DeviceClock", Events)
    monkeypatch.setattr(clock, "_cycles_per_second", lambda device: 3e9)
    monkeypatch.setattr(clock, "kernel_seconds", lambda kernel, device, count: [20e-6] * count)
    clock.device_accuracy(claim, CUDA, 50e-6, count=50)
    [bar] = claim.bars
    assert (bar.verdict, bar.value) == (verdict, pytest.approx(abs(factor - 1), abs=1e-9))

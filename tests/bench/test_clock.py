"""What the benchmark of the clocks compares them with; how exact they are is not asserted here."""

import math

import pytest
import torch

from bench import claim as claim_module
from bench import clock
from bench.claim import Claim
from bench.clock import Spin


@pytest.fixture
def claim(monkeypatch, tmp_path):
    monkeypatch.setattr(claim_module, "RESULTS", tmp_path)
    return Claim("clock", quick=True)


def test_a_spin_takes_what_it_says():
    spin = Spin(1e-4)
    spin()
    spin()
    assert len(spin.took) == 2
    assert all(took >= 1e-4 for took in spin.took)


@pytest.mark.parametrize("wrong, error", [(1.0, 0.0), (1.02, 0.02), (0.9, 0.1)])
def test_error_of_a_clock_that_is_wrong_by_so_much(claim, monkeypatch, wrong, error):
    def sample(self, call, count):
        for _ in range(count):
            call()
        return [took * wrong for took in call.took]

    monkeypatch.setattr(clock.HostClock, "sample", sample)
    clock.host_accuracy(claim, 1e-5, count=5)
    [bar] = claim.bars
    assert (bar.name, bar.limit, bar.at_most) == ("host clock, error at 0.01 ms", 0.005, True)
    assert bar.value == pytest.approx(error, abs=1e-9)


def test_costs(claim):
    clock.call_cost(claim, count=10, rounds=2)
    clock.step_cost(claim, clock.training_step(torch.device("cpu")), count=2)
    assert [bar.name for bar in claim.bars] == [
        "harness, us a call",
        "an empty call is read as, us",
        "harness, share of a step",
    ]
    assert all(bar.at_most and math.isfinite(bar.value) for bar in claim.bars)
    assert claim.bars[2].value > 0


def test_intervals_hold_what_they_say(claim):
    clock.interval_coverage(claim, trials=100)
    assert [bar.name for bar in claim.bars] == [f"interval of p{q}, coverage" for q in (50, 95, 99)]
    assert [bar.verdict for bar in claim.bars] == ["PASS"] * 3
    assert all(0.85 < bar.limit < 0.95 for bar in claim.bars)


def test_without_a_gpu_its_clock_is_not_measured(claim):
    clock.device_accuracy(claim, None, 20e-6, count=5)
    [bar] = claim.bars
    assert (bar.name, bar.verdict) == ("device clock, error at 20 us", "NOT MEASURED")

"""The reference: pinned, timed in turns, and a ratio that does not know how fast the machine is."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stackwise.gate.history.reference import Reference, ReferenceTime, log_ratio, median_time, referenced

SECONDS = st.floats(1e-7, 1e3)


@pytest.fixture(scope="module")
def reference():
    return Reference(torch.device("cpu"))


def test_it_computes_what_it_says(reference, monkeypatch):
    found = reference.sample()
    assert found.gemm > 0 and found.copy > 0
    assert torch.allclose(reference._product, reference._a @ reference._b)
    assert torch.equal(reference._to, reference._from) and reference._from.element_size() == 4
    assert reference._a.shape == (256, 256) and reference._a.dtype == torch.float64
    assert reference._to.untyped_storage().nbytes() == 32 * 2**20


def test_its_inputs_are_pinned(reference):
    torch.manual_seed(99)
    other = Reference(torch.device("cpu"))
    assert torch.equal(other._a, reference._a) and not torch.equal(other._a, other._b)


def test_it_leaves_no_trace_and_sees_none(reference):
    state = torch.get_rng_state()
    with torch.autocast("cpu"):
        reference.sample()
        assert torch.is_autocast_enabled("cpu")
    assert reference._product.dtype == torch.float64
    assert torch.equal(torch.get_rng_state(), state) and not torch.is_inference_mode_enabled()


class Turns:
    """Calls of a test and a reference in their order, on a machine that becomes slower with each."""

    def __init__(self):
        self.order, self.slowness = [], 1.0

    def take(self):
        self.order.append("test")
        self.slowness *= 1.01
        return 0.5 * self.slowness

    def sample(self):
        self.order.append("reference")
        self.slowness *= 1.01
        return ReferenceTime(0.1 * self.slowness, 0.4 * self.slowness)


def test_turns_are_balanced_and_cancel_drift():
    turns = Turns()
    found = referenced(turns.take, turns, turns=40, seed=3)
    firsts = turns.order[::2]
    assert len(turns.order) == 80 and firsts.count("test") == 20
    assert all({*firsts[i : i + 2]} == {"test", "reference"} for i in range(0, 40, 2))
    # The machine is 2.2 times as slow at the end; the ratio 0.5 / 0.2 is seen to half of one call's drift.
    assert found.log_ratio == pytest.approx(math.log(2.5), abs=0.0101)
    assert max(found.samples) / min(found.samples) > 2
    again = Turns()
    assert referenced(again.take, again, turns=40, seed=3) == found
    other = Turns()
    referenced(other.take, other, turns=40, seed=4)
    assert other.order != turns.order


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=20), st.floats(0.01, 100))
def test_a_slower_machine_has_the_same_ratio(turns, factor):
    samples = [test for test, _, _ in turns]
    times = [ReferenceTime(gemm, copy) for _, gemm, copy in turns]
    slower = [ReferenceTime(time.gemm * factor, time.copy * factor) for time in times]
    assert log_ratio([each * factor for each in samples], slower) == pytest.approx(log_ratio(samples, times))
    wanted = statistics.median(
        math.log(test) - (math.log(gemm) + math.log(copy)) / 2 for test, gemm, copy in turns
    )
    assert log_ratio(samples, times) == pytest.approx(wanted, abs=1e-9)


def test_medians_are_of_each_part():
    times = [ReferenceTime(1.0, 9.0), ReferenceTime(2.0, 8.0), ReferenceTime(5.0, 1.0)]
    assert median_time(times) == ReferenceTime(2.0, 8.0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf], ids=str)
def test_what_is_no_time_is_refused(value):
    with pytest.raises(ValueError, match="reference copy: got"):
        ReferenceTime(1.0, value)
    with pytest.raises(ValueError, match="sample: got"):
        log_ratio([value], [ReferenceTime(1.0, 1.0)])


@pytest.mark.parametrize("count", [0, 2])
def test_each_turn_has_both(count):
    with pytest.raises(ValueError, match=f"samples: got {count}"):
        log_ratio([1.0] * count, [ReferenceTime(1.0, 1.0)] * (count // 2))

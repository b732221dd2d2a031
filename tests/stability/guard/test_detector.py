"""SpikeDetector against NumPy, what becomes the rule for it and what does not."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.stability.guard.detector import SpikeDetector

NORMS = st.floats(1e-6, 1e6)


def expected_limit(norms, deviations=6.0, factor=3.0, recent=8):
    logs = np.log(norms)
    changes = np.diff(logs)
    mad = np.median(np.abs(changes - np.median(changes)))
    return float(np.exp(np.median(logs[-recent:]) + max(deviations * mad, np.log(factor))))


def limit_after(norms, **arguments):
    detector = SpikeDetector(**arguments)
    for norm in norms:
        detector.accept(norm)
    return detector.limit()


def watch(detector, norms):
    """The steps that are spikes, where a sound step is accepted and a spike is not."""
    spikes = []
    for step, norm in enumerate(norms):
        limit = detector.limit()
        if limit is not None and norm > limit:
            spikes.append(step)
        else:
            detector.accept(norm)
    return spikes


def steady(count, seed=0, spread=0.1):
    return np.exp(np.random.default_rng(seed).normal(0.0, spread, count)).tolist()


@given(st.lists(NORMS, min_size=4, max_size=40))
def test_limit(norms):
    assert limit_after(norms) == pytest.approx(expected_limit(norms), rel=1e-9)


@given(st.lists(NORMS, min_size=4, max_size=20), st.floats(1.0, 20.0), st.floats(1.01, 50.0))
def test_limit_of_other_settings(norms, deviations, factor):
    limit = limit_after(norms, deviations=deviations, factor=factor)
    assert limit == pytest.approx(expected_limit(norms, deviations, factor), rel=1e-9)


@given(st.lists(NORMS, min_size=4, max_size=20), st.floats(1e-3, 1e3))
def test_the_unit_does_not_matter(norms, unit):
    scaled = limit_after([norm * unit for norm in norms])
    assert scaled == pytest.approx(limit_after(norms) * unit, rel=1e-9)


@pytest.mark.parametrize("minimum", [1, 4, 7])
def test_minimum(minimum):
    for count in range(10):
        limit = limit_after([2.0] * count, minimum=minimum)
        assert (limit is None) == (count < minimum)
    assert limit == pytest.approx(6.0)


def test_history_forgets():
    norms = [1.0] * 50 + [100.0] * 5
    assert limit_after(norms, history=5) == pytest.approx(300.0)
    assert limit_after(norms, history=50, recent=5) == pytest.approx(300.0)
    assert limit_after(norms, history=50, recent=50) == pytest.approx(3.0)


def test_norms_that_fall_are_no_scatter():
    # Gradient norms of a small RWKV in its first steps, and its tenth times ten.
    norms = [676.0, 184.0, 160.0, 32.0, 22.0, 17.0, 16.0, 15.0]
    assert watch(SpikeDetector(), [*norms, 132.0]) == [8]


def test_a_norm_of_zero_says_nothing():
    assert limit_after([0.0] * 10) is None
    assert limit_after([0.0, 1.0, 1.0, 0.0, 1.0, 1.0]) == pytest.approx(3.0)


@pytest.mark.parametrize("seed", range(5))
def test_steady_norms_are_no_spikes(seed):
    assert watch(SpikeDetector(), steady(500, seed)) == []


@pytest.mark.parametrize("seed", range(5))
def test_spikes_are_found(seed):
    norms = steady(200, seed)
    for step in (4, 50, 51, 199):
        norms[step] *= 10
    assert watch(SpikeDetector(), norms) == [4, 50, 51, 199]


def test_a_spike_before_there_is_a_history_is_no_spike():
    norms = steady(20)
    norms[3] *= 10
    assert watch(SpikeDetector(), norms) == []


def test_a_lasting_spike_never_becomes_the_rule():
    norms = steady(1000)
    broken = list(range(10, 900))
    for step in broken:
        norms[step] *= 10
    assert watch(SpikeDetector(), norms) == broken


def test_a_history_of_everything_would_take_it_for_the_rule():
    # The same, if spikes were remembered: what the detector's caller must not do.
    norms = steady(1000)
    detector, spikes = SpikeDetector(), []
    for step, norm in enumerate(norms):
        norm = norm * 10 if step >= 10 else norm
        limit = detector.limit()
        if limit is not None and norm > limit:
            spikes.append(step)
        detector.accept(norm)
    assert spikes
    assert spikes[-1] < 500


@pytest.mark.parametrize("seed", range(5))
def test_a_restart_of_the_learning_rate_is_no_spike(seed):
    norms = np.array(steady(100, seed, spread=0.05))
    norms[50:] *= 2.5
    assert watch(SpikeDetector(), norms.tolist()) == []


def test_drift_is_no_spike():
    norms = (np.array(steady(500)) * np.exp(np.linspace(0, 8, 500))).tolist()
    assert watch(SpikeDetector(), norms) == []
    norms[400] *= 1000
    assert watch(SpikeDetector(), norms) == [400]


def test_noise_widens_the_limit():
    quiet, noisy = limit_after(steady(100, spread=0.01)), limit_after(steady(100, spread=1.0))
    assert quiet == pytest.approx(3.0, rel=0.05)
    assert noisy > 20


def test_a_few_outliers_do_not_move_the_limit():
    # Mean and standard deviation of the same log-norms would let 80 times as much pass.
    norms = [*steady(30, spread=0.05), 1e4, 1e4]
    assert limit_after(norms) == pytest.approx(3.0, rel=0.1)
    logs = np.log(norms)
    assert math.exp(logs.mean() + 6 * logs.std()) > 200


@pytest.mark.parametrize("norm", [math.nan, math.inf, 0.0, -1.0])
def test_what_is_not_remembered_on_the_host(norm):
    detector = SpikeDetector(minimum=2, recent=1)
    detector.accept(2.0)
    detector.accept(norm)
    assert detector.limit() is None
    detector.accept(2.0)
    assert detector.limit() == pytest.approx(6.0)

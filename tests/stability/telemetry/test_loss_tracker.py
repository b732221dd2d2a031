"""LossTracker: each figure against the same by NumPy and by hand in float64."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stackwise.stability.telemetry import LossRecord, LossTracker, bits_per_byte, perplexity

LOSSES = st.floats(0.125, 16.0, width=32) | st.sampled_from([math.nan, math.inf, -math.inf])


def tracked(losses, **options):
    tracker = LossTracker(**options)
    for loss in losses:
        tracker.observe(torch.tensor(loss))
    return tracker.records()


@given(st.lists(LOSSES, min_size=1, max_size=12), st.integers(2, 5), st.sampled_from([0.0, 0.5, 0.98]))
def test_every_figure(losses, window, decay):
    records = tracked(losses, window=window, decay=decay, capacity=4)
    assert [record.step for record in records] == list(range(len(losses)))
    for i, record in enumerate(records):
        seen = np.array(losses[: i + 1])
        recent, before = seen[-window:], seen[max(0, i - window) : i]
        recent, before, sound = (x[np.isfinite(x)] for x in (recent, before, seen))
        weights = decay ** np.arange(len(sound))[::-1]
        assert record.finite == math.isfinite(losses[i])
        assert record.loss == pytest.approx(losses[i], nan_ok=True)
        assert record.mean == pytest.approx(recent.mean() if len(recent) else math.nan, nan_ok=True, rel=1e-5)
        smoothed = (weights @ sound) / weights.sum() if len(sound) else math.nan
        assert record.smoothed == pytest.approx(smoothed, nan_ok=True, rel=1e-4)
        assert record.best == (sound.min() if len(sound) else math.inf)
        if len(before) < 2:
            assert math.isnan(record.z_score)
        elif before.std() > 1e-2 and record.finite:
            expected = (losses[i] - before.mean()) / before.std(ddof=1)
            assert record.z_score == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_a_spike_stands_out():
    noise = np.random.default_rng(0).normal(3.0, 0.1, 50).tolist()
    *calm, spike = tracked([*noise, 5.0], window=50)
    assert max(abs(record.z_score) for record in calm[10:]) < 6 < 15 < spike.z_score


@pytest.mark.parametrize("loss", [2.0, 2.3026, 0.1])
def test_of_equal_losses(loss):
    """Also where the sum of them is no multiple of them in float32."""
    *_, still, up = tracked([loss] * 51 + [loss + 1.0], window=50)
    assert still.mean == still.best == still.loss
    assert math.isnan(still.z_score)
    assert up.z_score == math.inf


def test_state_stays_on_the_device_and_has_no_graph():
    loss = torch.tensor([2.5], dtype=torch.bfloat16, requires_grad=True)
    state = LossTracker().observe(loss * 2)
    assert all(x.shape == () and x.dtype == torch.float32 and not x.requires_grad for x in state)
    assert (state.loss.item(), state.mean.item(), state.finite.item()) == (5.0, 5.0, 1.0)


def test_a_loss_that_is_overwritten():
    tracker, loss = LossTracker(), torch.tensor(1.0)
    tracker.observe(loss)
    loss.fill_(9.0)
    assert tracker.records()[0].loss == 1.0


def test_a_tracker_that_is_not_read_forgets_nothing():
    records = tracked([float(n) for n in range(30)], capacity=4)
    assert [record.loss for record in records] == list(range(30))


def test_steps_as_they_are_given():
    tracker = LossTracker()
    for step in (5, None):
        tracker.observe(torch.tensor(1.0), step)
    assert [record.step for record in tracker.drain()] == [5, 6]
    assert tracker.records() == tracker.drain() == []


def test_nothing_observed():
    assert LossTracker().records() == LossTracker().drain() == []


def test_record_is_data():
    [record] = tracked([1.0])
    stored = json.loads(json.dumps(record.to_dict()))
    assert LossRecord(**stored).to_dict() == pytest.approx(record.to_dict(), nan_ok=True)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 1}, "window: got 1; allowed: an integer >= 2"),
        ({"capacity": 1}, "capacity: got 1; allowed: an integer >= 2"),
        ({"decay": 1.0}, "decay: got 1.0; allowed: 0 <= decay < 1"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LossTracker(**options)


def test_more_than_one_loss():
    with pytest.raises(ValueError, match=r"loss: got \(2,\); allowed: one element"):
        LossTracker().observe(torch.zeros(2))


def test_perplexity():
    # A uniform guess among V tokens has perplexity V.
    assert perplexity(math.log(50257)) == pytest.approx(50257)
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_bits_per_byte():
    # One token a byte, each a uniform guess among 256: eight bits.
    assert bits_per_byte(math.log(256), 10, 10) == pytest.approx(8.0)
    # Half as many tokens as bytes halve it.
    assert bits_per_byte(math.log(256), 5, 10) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="n_bytes: got 0"):
        bits_per_byte(1.0, 1, 0)

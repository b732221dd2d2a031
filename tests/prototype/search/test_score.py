"""The score: numbers by hand, and what it may never do."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.prototype.search import ScoreWeights, TrialOutcome, score_config

REFERENCE = ScoreWeights(
    time=0.1, memory=0.05, reference_tokens_per_second=1000.0, reference_peak_bytes=2.0**20
)


def outcome(loss=2.0, rate=1000.0, peak=2**20, status="success"):
    return TrialOutcome(status, loss, rate, peak)


@pytest.mark.parametrize(
    "run, score",
    [
        (outcome(), -2.0),
        (outcome(rate=2000.0), -1.9),  # twice as fast: 0.1 nats
        (outcome(rate=250.0), -2.2),
        (outcome(peak=2**22), -2.1),  # four times the memory: 2 * 0.05
        (outcome(loss=1.5, rate=500.0, peak=2**19), -1.55),
        (outcome(status="spiky"), -math.inf),
        (outcome(status="nan", loss=math.inf), -math.inf),
        (outcome(status="error", loss=math.inf, rate=None, peak=None), -math.inf),
    ],
)
def test_by_hand(run, score):
    assert score_config(run, weights=REFERENCE) == pytest.approx(score)


def test_default_weights_and_references():
    # 1e6 tokens/s and 1 GiB: a million is no power of two, so that only the loss is left.
    assert score_config(outcome(3.0, 1e6, 2**30)) == pytest.approx(-3.0)
    assert score_config(outcome(3.0, 5e5, 2**31)) == pytest.approx(-3.15)


def test_of_a_forward_pass_speed_and_peak_are_taken():
    class Forward:
        tokens_per_second, peak_bytes = 4000.0, 2**21

    assert score_config(outcome(), Forward(), REFERENCE) == pytest.approx(-2.0 + 0.2 - 0.05)


def test_validation_loss_goes_before_that_of_training():
    class Run:
        status, final_loss, validation_loss = "success", 1.0, 2.5
        tokens_per_second, peak_bytes = 1000.0, 2**20

    assert score_config(Run(), weights=REFERENCE) == pytest.approx(-2.5)
    Run.validation_loss = None
    assert score_config(Run(), weights=REFERENCE) == pytest.approx(-1.0)


@given(
    st.floats(0.1, 10.0),
    st.floats(1.0, 1e8),
    st.integers(1, 2**40),
    st.floats(0.0, 5.0),
    st.floats(1.0, 100.0),
    st.integers(0, 2**30),
    st.floats(1.0, 1e6),
)
def test_is_monotone_and_references_move_all_alike(loss, rate, peak, worse, slower, more, reference):
    better, other = outcome(loss, rate, peak), outcome(loss + worse, rate / slower, peak + more)
    assert score_config(better, weights=REFERENCE) >= score_config(other, weights=REFERENCE)
    moved = ScoreWeights(0.1, 0.05, reference, 2.0**25)
    gaps = [score_config(better, weights=w) - score_config(other, weights=w) for w in (REFERENCE, moved)]
    assert gaps[0] == pytest.approx(gaps[1], abs=1e-8)


def test_what_has_a_weight_is_measured():
    with pytest.raises(ValueError, match="peak_bytes: got None"):
        score_config(outcome(peak=None))
    with pytest.raises(ValueError, match="tokens_per_second: got None"):
        score_config(outcome(rate=None))
    free = ScoreWeights(time=0.0, memory=0.0)
    assert score_config(outcome(rate=None, peak=None), weights=free) == -2.0


@pytest.mark.parametrize("key", ["time", "memory", "reference_tokens_per_second", "reference_peak_bytes"])
def test_weights_are_checked(key):
    with pytest.raises(ValueError, match=f"{key}: got -1"):
        ScoreWeights(**{key: -1.0})

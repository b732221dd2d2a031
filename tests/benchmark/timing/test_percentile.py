"""Percentiles, against numpy's, and their intervals, against the binomial distribution summed exactly."""

import json
from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.benchmark.timing.percentile import Percentile, least_count, percentile


def coverage(count, fraction, low, high):
    """Probability that the true percentile is between the samples of ranks `low` and `high`, from 1.

    It is if at least `low` and fewer than `high` samples are below it.
    """
    p = Fraction(fraction).limit_denominator(10_000)
    terms = (comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(low, high))
    return sum(terms)


def ranks(count, q, **options):
    found = percentile(range(1, count + 1), q, **options)
    return found.low, found.high


@pytest.mark.parametrize(
    "count, expected",
    # Tables of the sign test: the largest r with P(B(n, 1/2) < r) <= 0.025.
    [(6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (10, (2, 9)), (20, (6, 15)), (50, (18, 33)), (100, (40, 61))],
)
def test_interval_of_the_median(count, expected):
    assert ranks(count, 50) == expected


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_median_of_few_has_no_interval(count):
    found = percentile([3.0] * count, 50)
    assert (found.value, found.low, found.high) == (3.0, None, None)


@pytest.mark.parametrize("q, count", [(50, 37), (25, 60), (90, 150), (95, 200), (99, 1000), (5, 400)])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_the_narrowest_that_has_the_confidence_on_either_side(q, count, confidence):
    low, high = map(int, ranks(count, q, confidence=confidence))
    fraction, risk = Fraction(q, 100), (1 - Fraction(confidence).limit_denominator(1000)) / 2
    below, above = 1 - coverage(count, fraction, low, count + 1), 1 - coverage(count, fraction, 0, high)
    assert below <= risk
    assert above <= risk
    assert 1 - coverage(count, fraction, low + 1, count + 1) > risk
    assert 1 - coverage(count, fraction, 0, high - 1) > risk


@pytest.mark.parametrize("q, least", [(50, 1), (90, 100), (95, 200), (99, 1000), (99.9, 10_000), (5, 200)])
def test_few_samples_tell_no_tail(q, least):
    assert least_count(q) == least
    if least > 1:
        assert percentile([1.0] * (least - 1), q) == Percentile(q, None, None, None, least - 1)
    told = percentile(list(range(least)), q)
    assert told.value is not None
    if q != 50:
        # Ten samples beyond it are enough for an interval that ends before the outermost.
        assert 0 < told.low < told.value < told.high < least - 1


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=40), st.randoms())
def test_order_does_not_matter_and_the_median_is_numpys(samples, random):
    found = percentile(samples, 50)
    assert found.value == pytest.approx(np.median(samples), rel=1e-12)
    shuffled = list(samples)
    random.shuffle(shuffled)
    assert percentile(shuffled, 50) == found
    if found.low is not None:
        assert found.low <= found.value <= found.high


def test_value_is_interpolated_as_numpy_does():
    samples = np.random.default_rng(0).exponential(size=1234)
    assert percentile(samples, 95).value == np.percentile(samples, 95)


@pytest.mark.parametrize("q", [0.5, 0.99, 0, 100, -1, 101, None, "95", True, float("nan")])
def test_other_percentiles(q):
    with pytest.raises(ValueError, match=r"q: got .*; allowed: a number from 1 to 99\.999, in percent"):
        percentile([1.0], q)


@pytest.mark.parametrize("confidence", [0, 1, 95, None, float("inf")])
def test_other_confidences(confidence):
    with pytest.raises(ValueError, match=r"confidence: got .*; allowed: a number between 0 and 1"):
        percentile([1.0], 50, confidence=confidence)


def test_no_samples():
    with pytest.raises(ValueError, match="samples: got none; allowed: one or more"):
        percentile([], 50)


def test_as_json():
    stored = json.loads(json.dumps(percentile(list(range(10)), 50, confidence=0.9).to_dict()))
    assert stored == {"q": 50, "value": 4.5, "low": 1.0, "high": 8.0, "count": 10, "confidence": 0.9}

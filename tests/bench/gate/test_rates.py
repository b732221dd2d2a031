"""Rates with intervals, and thresholds that are moved."""

import math

import pytest
from scipy.stats import binomtest

from bench.gate.rates import Rate, at_false_alarms, roc


@pytest.mark.parametrize(("hits", "n"), [(0, 1000), (1, 1000), (10, 10), (7, 23), (300, 300)])
def test_interval_is_that_of_clopper_and_pearson(hits, n):
    found = Rate.of(hits, n)
    wanted = binomtest(hits, n).proportion_ci(0.95, method="exact")
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))


def test_interval_by_the_table():
    """No alarm in 1000 is up to 0.37 %, in both directions; the rule of three says 0.3 in one."""
    assert Rate.of(0, 1000).high == pytest.approx(0.003682, abs=1e-6)
    assert Rate.of(0, 1000, confidence=0.90).high == pytest.approx(1 - 0.05 ** (1 / 1000))


def test_of_none_there_is_no_rate():
    found = Rate.of(0, 0)
    assert (found.value, found.low, found.high, str(found)) == (None, 0.0, 1.0, "-")


def test_more_hits_than_there_are():
    with pytest.raises(ValueError, match="got 3; allowed: 0 to 2"):
        Rate.of(3, 2)


def test_every_threshold_that_makes_a_difference():
    points = roc([0.0, 0.02, 0.02, -math.inf], [0.02, 0.05, -math.inf])
    assert [(point.threshold, point.false_alarms, point.detected) for point in points] == [
        (math.inf, 0.0, 0.0),
        (0.05, 0.0, 1 / 3),
        (0.02, 0.5, 2 / 3),
        (0.0, 0.75, 2 / 3),
    ]


def test_best_point_within_a_share_of_false_alarms():
    points = roc([i / 100 for i in range(100)], [0.5 + i / 100 for i in range(100)])
    best = at_false_alarms(points, 0.1)
    assert best.threshold == pytest.approx(0.9)
    assert (best.false_alarms, best.detected) == (pytest.approx(0.1), pytest.approx(0.6))
    assert at_false_alarms(points, 0.0).detected == pytest.approx(0.5)


def test_one_kind_alone_has_no_curve():
    with pytest.raises(ValueError, match="got 0 without an effect and 1 with one"):
        roc([], [0.1])

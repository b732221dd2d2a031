"""Estimates: a mean and its interval, against SciPy's and the table of Student's t."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from stackwise.prototype.estimate import Estimate

VALUES = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20)


@given(VALUES, st.floats(0.5, 0.999))
def test_the_interval_is_that_of_students_t(values, level):
    estimate = Estimate.of(values, level)
    error = scipy.stats.sem(values)
    if error > 0:
        low, high = scipy.stats.t.interval(level, len(values) - 1, loc=np.mean(values), scale=error)
        assert (estimate.low, estimate.high) == pytest.approx((low, high), rel=1e-9, abs=1e-9)
    assert estimate.value == pytest.approx(np.mean(values), rel=1e-12, abs=1e-12)
    assert estimate.count == len(values)


def test_of_three_seeds_the_reach_is_4303_standard_errors():
    estimate = Estimate.of([1.0, 2.0, 3.0])
    assert estimate.high - 2 == pytest.approx(4.3027 / math.sqrt(3), abs=1e-4)
    assert str(estimate) == "2.000 [-0.484, 4.484]"


def test_one_seed_has_no_interval():
    estimate = Estimate.of([0.25])
    assert (estimate.value, estimate.low, estimate.high, estimate.count) == (0.25, None, None, 1)
    assert str(estimate) == "0.250"


@pytest.mark.parametrize(
    ("values", "level", "message"),
    [([], 0.95, "values: got 0"), ([1.0, math.nan], 0.95, "values: got nan"), ([1.0], 1.0, "level: got 1.0")],
    ids=["none", "nan", "level"],
)
def test_what_has_no_mean_is_refused(values, level, message):
    with pytest.raises(ValueError, match=message):
        Estimate.of(values, level)


def test_an_interval_as_often_as_it_says_holds_the_mean():
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=(2000, 3))
    estimates = [Estimate.of(list(map(float, row))) for row in drawn]
    held = np.mean([each.low <= 0 <= each.high for each in estimates])
    assert held == pytest.approx(0.95, abs=0.015)  # three standard errors

"""Drift: slow drift moves the band, a jump is outside of it."""

import math

import numpy as np
import pytest
from scipy import stats

from stackwise.gate.history.record import Band
from stackwise.gate.history.reference import ReferenceTime


def test_the_band_is_students_prediction_interval():
    random = np.random.default_rng(1)
    gemm, copy = random.lognormal(-7, 0.1, 20), random.lognormal(-5, 0.05, 20)
    band = Band.of([ReferenceTime(*pair) for pair in zip(gemm, copy, strict=True)], alpha=0.01)
    for times, (low, high) in ((gemm, band.gemm), (copy, band.copy)):
        logs = np.log(times)
        scale = logs.std(ddof=1) * math.sqrt(1 + 1 / 20)
        wanted = stats.t.interval(0.99, 19, loc=logs.mean(), scale=scale)
        assert (math.log(low), math.log(high)) == pytest.approx(wanted)
    assert band.runs == 20


def test_few_runs_have_no_band():
    assert Band.of([ReferenceTime(1.0, 1.0)] * 7) is None


def test_no_band_is_narrower_than_two_percent():
    band = Band.of([ReferenceTime(1e-3, 4e-3)] * 8)
    assert band.gemm == pytest.approx((1e-3 / 1.02, 1.02e-3))
    assert band.outside(ReferenceTime(1.019e-3, 3.93e-3)) == ""


def test_what_jumped_is_named_with_both_times():
    band = Band.of([ReferenceTime(1e-3, 4e-3)] * 8)
    assert band.outside(ReferenceTime(1e-3, 6e-3)) == (
        "the copy of memory took 6 ms where 3.92 to 4.08 ms were expected"
    )
    said = band.outside(ReferenceTime(0.5e-3, 6e-3))
    assert said.startswith("the product of matrices took 0.5 ms") and " and the copy of memory" in said


def test_runs_of_one_machine_are_seldom_outside():
    random = np.random.default_rng(2)
    outside = 0
    for _ in range(2000):
        *before, new = [ReferenceTime(*pair) for pair in np.exp(random.normal(0, 0.05, (13, 2)))]
        outside += Band.of(before, alpha=0.01).outside(new) != ""
    # Of two parts with 1 % each: 40 of 2000 are expected, more than 62 with a chance of 0.1 %.
    assert 20 <= outside <= 62

"""Rounds that are far from the others."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from stackwise.gate.limit import Limit
from stackwise.gate.sequential import without_outliers
from stackwise.gate.trial import Trial
from stackwise.gate.verdict import Verdict

TOLERANCE = math.log1p(0.02)
QUIET = [0.002, -0.004, 0.001, 0.003, -0.002, 0.005, -0.001]


def test_a_stray_round_is_left_out_wherever_it_is():
    for place in range(8):
        for stray in (0.3, -0.3):
            rounds = [*QUIET[:place], stray, *QUIET[place:]]
            assert without_outliers(rounds, TOLERANCE).tolist() == QUIET


@pytest.mark.parametrize(
    "rounds",
    [
        [*QUIET[:6], 0.3],
        [*QUIET, 0.035],
        [*QUIET, 0.3, 0.3],
        [0.05 * each for each in (1, -1, 2, -2, 0.5, -0.5, 3, -5)],
        [0.0] * 9 + [0.05],
        [1e-17, -1e-17] * 5 + [0.05],
    ],
    ids=["few", "within two tolerances", "one in four", "loud", "equal", "rounded"],
)
def test_what_stays(rounds):
    assert without_outliers(rounds, TOLERANCE).tolist() == rounds


def test_the_wider_the_tolerance_the_more_is_near():
    rounds = [*QUIET, 0.15]
    assert len(without_outliers(rounds, math.log1p(0.05))) == 7
    assert len(without_outliers(rounds, math.log1p(0.1))) == 8


@given(npst.arrays(np.float64, st.integers(1, 30), elements=st.floats(-1, 1)), st.floats(0.001, 0.2))
def test_either_side_is_treated_alike(values, tolerance):
    kept = without_outliers(values, tolerance)
    assert np.array_equal(without_outliers(-values, tolerance), -kept)
    assert len(values) - len(kept) <= len(values) // 6
    assert set(kept) <= set(values)


@pytest.mark.parametrize(
    ("change", "verdict"), [(0.0, Verdict.PASS), (0.05, Verdict.REGRESSED), (-0.05, Verdict.IMPROVED)]
)
def test_one_stray_round_keeps_nothing_from_being_found(change, verdict):
    trial = Trial(Limit())
    for each in (*QUIET[:3], -0.32, *QUIET[3:], *QUIET):
        trial.add(math.log1p(change) + each, 1.0)
        if trial.decided:
            break
    assert trial.decision.verdict == verdict
    assert "after 8 rounds (1 removed as outliers)" in trial.decision.reason
    assert trial.decision.estimate == pytest.approx(change, abs=0.004)

"""The slowdown that all tests of a run have in common."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from stackwise.gate.limit import Limit
from stackwise.gate.sequential import Rule
from stackwise.gate.suite import ALPHA, suite_result
from stackwise.gate.trial import Trial
from stackwise.gate.verdict import Verdict

RULE = Rule()
ROUNDS = RULE.looks[0]


def suite(rng, *, change=0.0, n_tests=40, own=0.015, common=0.004, shape="normal", rounds=ROUNDS + 1):
    """Trials of one run: noise of each test, and noise that all tests of a round share."""
    draw = {
        "normal": rng.standard_normal,
        "t3": lambda size: rng.standard_t(3, size) / math.sqrt(3),
        "laplace": lambda size: rng.laplace(size=size) / math.sqrt(2),
        "two states": lambda size: _two_states(rng, size),
    }[shape]
    values = math.log1p(change) + own * draw((n_tests, rounds)) + common * draw((1, rounds))
    trials = [Trial(Limit(), RULE, n_tests) for _ in range(n_tests)]
    for trial, row in zip(trials, values, strict=True):
        for difference in row:
            if not trial.decided:
                trial.add(difference, 1e-3)
    return trials


def found(n_suites, **given):
    rng = np.random.default_rng(0)
    return sum(suite_result(suite(rng, **given), RULE) is not None for _ in range(n_suites))


@pytest.mark.parametrize("shape", ["normal", "t3", "laplace", "two states"])
@pytest.mark.parametrize("common", [0.0, 0.004, 0.02])
def test_no_alarm_in_suites_that_have_not_changed(shape, common):
    assert found(300, shape=shape, common=common) == 0


def test_error_rate_without_a_tolerance_is_the_stated_one(monkeypatch):
    """The t interval alone, in 20,000 suites whose tolerance is next to nothing."""
    rng = np.random.default_rng(0)
    rounds = 0.004 * rng.standard_normal((20_000, ROUNDS + 1))
    t = rounds.mean(1) / (rounds.std(1, ddof=1) / math.sqrt(ROUNDS + 1))
    alarms = sum(suite_result([_trial(row) for _ in range(5)], RULE) is not None for row in rounds[t > 5])
    assert alarms <= 2 * ALPHA * len(rounds)


def _two_states(rng, size):
    """A process is fast or slow for as long as it lives, on either side."""
    apart = (rng.random(size) < 0.5).astype(float) - (rng.random(size) < 0.5)
    return 0.95 * apart / math.sqrt(0.5) + math.sqrt(1 - 0.95**2) * rng.standard_normal(size)


def _trial(row):
    trial = Trial(Limit(tolerance=1e-9, minimum_effect=0.0), RULE)
    for difference in row:
        trial.add(difference, 1e-3)
    return trial


@pytest.mark.parametrize("change, least", [(0.04, 0.8), (0.10, 0.99), (0.70, 1.0)])
def test_a_slower_suite_is_found(change, least):
    assert found(200, change=change) >= least * 200


def test_a_suite_that_is_slower_by_less_than_the_tolerance_is_none():
    assert found(200, change=0.01, common=0.0) == 0


def test_tests_within_their_own_tolerance_are_no_regression():
    """Only tests with a wide tolerance have later rounds, so the mean of these rounds is larger."""
    rng = np.random.default_rng(0)

    def measured(tolerance, change, rounds):
        values = tuple(math.log1p(change) + 0.01 * rng.standard_normal(rounds))
        return SimpleNamespace(differences=values, limit=Limit(tolerance), base_level=1e-3)

    within = [measured(0.5, 0.4, ROUNDS + 20) for _ in range(10)]
    assert suite_result([*within, *(measured(0.01, 0.0, ROUNDS) for _ in range(10))], RULE) is None
    assert suite_result([*within, *(measured(0.01, 0.4, ROUNDS + 20) for _ in range(10))], RULE) is not None


def test_result_names_change_and_interval():
    result = suite_result(suite(np.random.default_rng(0), change=0.5), RULE)
    decision = result.trials["time"].decision
    assert decision.verdict == Verdict.REGRESSED
    assert decision.low < 0.5 < decision.high
    assert decision.rounds == ROUNDS + 1
    assert "mean cost of 40 tests" in decision.reason


def test_tests_that_have_too_few_rounds_do_not_count():
    rng = np.random.default_rng(0)
    few = suite(rng, change=0.5, rounds=ROUNDS - 1)
    assert suite_result(few, RULE) is None
    assert suite_result(suite(rng, change=0.5, rounds=ROUNDS), RULE) is None
    assert suite_result([*few, *suite(rng, change=0.5, n_tests=4)], RULE) is None

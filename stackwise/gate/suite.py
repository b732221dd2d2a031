"""Suite: common slowdown of all tests of a run.

A change that slows down everything can be too small to be proved for a single test in the time of a run. The
mean change over all tests has less noise, so it can be proved earlier.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import zip_longest

from stackwise.gate.result import TestResult, TrialResult
from stackwise.gate.sequential import Rule, surely_differs, without_outliers
from stackwise.gate.trial import LEAST_FRESH, Trial
from stackwise.gate.verdict import Decision, Verdict

__all__ = ["SUITE", "suite_result"]

SUITE = "(all tests together)"
# Error rate: probability that a suite without a change is found slower.
ALPHA = 0.001
_LEAST_TESTS = 5


def suite_result(times: Sequence[Trial], rule: Rule) -> TestResult | None:
    """Return the regression of the whole suite, or None if no regression is proved.

    The difference of a round is the mean difference over all tests. Each test has the rounds up to the first
    look, regardless of its result. Only earlier rounds decide which tests have later rounds, so later rounds
    do not bias the mean. At least one later round with half of the tests is required. A Student's t interval
    over the rounds has to exclude 0 at `ALPHA`, and the mean difference has to exceed the tolerance of its
    tests.

    Args:
        times: trials of the metric "time", one per test.
        rule: rule of the decisions. Only its first look is used.
    """
    first_look = rule.looks[0]
    whole = [trial for trial in times if len(trial.differences) >= first_look]
    if len(whole) < _LEAST_TESTS:
        return None
    differences = _means([trial.differences for trial in whole])
    limits = [trial.limit.at(trial.base_level) for trial in whole]
    tolerance, least = (statistics.fmean(column) for column in zip(*limits, strict=True))
    found = surely_differs(differences, tolerance, ALPHA)
    # Per test: tests with a wide tolerance may have more of the later rounds.
    tolerances = [limit for limit, _ in limits]
    excess = _means(
        [[value - own for value in trial.differences] for trial, own in zip(whole, tolerances, strict=True)]
    )
    exceeds = found is not None and found[0] > 0 and without_outliers(excess, tolerance).mean() > 0
    if len(differences) < first_look + LEAST_FRESH or found is None or not exceeds:
        return None
    estimate, low, high = map(math.expm1, found)
    rounds = len(differences)
    reason = f"the mean cost of {len(whole)} tests is significantly higher after {rounds} rounds"
    decision = Decision(Verdict.REGRESSED, estimate, low, high, 1 - 2 * ALPHA, rounds, True, reason)
    trial = TrialResult(decision, "s", math.expm1(tolerance), math.expm1(least), differences, (), ())
    return TestResult(SUITE, "measured", {"time": trial})


def _means(by_test: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the mean difference of each round that has at least half of the tests."""
    rounds = zip_longest(*by_test)
    present = ([value for value in values if value is not None] for values in rounds)
    return tuple(statistics.fmean(values) for values in present if 2 * len(values) >= len(by_test))

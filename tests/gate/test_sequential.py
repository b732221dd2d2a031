import math

import numpy as np
import pytest
from scipy import stats

from stackwise.gate.limit import Limit
from stackwise.gate.sequential import Rule
from stackwise.gate.verdict import Verdict

TOLERANCE, LEAST = Limit().at(1.0)
# Four rounds about 0 with a standard deviation of 1.
SPREAD = np.array([-1.0, -1.0, 1.0, 1.0]) * math.sqrt(3) / 2
ONE_LOOK = Rule(alpha=0.01, miss=0.05, looks=(4,))


def look(rule, mean, sd, **options):
    return rule.look(list(mean + sd * SPREAD), TOLERANCE, LEAST, **options)


@pytest.mark.parametrize(
    ("mean", "sd", "verdict", "level"),
    [
        (0.0, 0.003, Verdict.PASS, 0.9),
        (0.03, 0.003, Verdict.REGRESSED, 0.98),
        (-0.03, 0.003, Verdict.IMPROVED, 0.98),
        (0.01, 0.02, Verdict.INCONCLUSIVE, 0.94),
    ],
)
def test_one_look_is_students_t(mean, sd, verdict, level):
    decision = look(ONE_LOOK, mean, sd)
    assert (decision.verdict, decision.rounds, decision.confirmed) == (verdict, 4, False)
    assert decision.level == pytest.approx(level)
    assert decision.estimate == pytest.approx(math.expm1(mean))
    below, above = {
        Verdict.PASS: (0.05, 0.05),
        Verdict.INCONCLUSIVE: (0.01, 0.05),
    }.get(verdict, (0.01, 0.01))
    error = sd / math.sqrt(4)
    assert math.log1p(decision.low) == pytest.approx(mean - stats.t.isf(below, 3) * error)
    assert math.log1p(decision.high) == pytest.approx(mean + stats.t.isf(above, 3) * error)


def test_between_looks_nothing_is_decided():
    rule = Rule()
    assert [rule.look([0.0] * rounds, TOLERANCE, LEAST) is None for rounds in range(1, 12)] == [
        rounds not in (4, 5, 6, 7, 8, 10) for rounds in range(1, 12)
    ]


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (0.0, Verdict.PASS),
        (0.0099, Verdict.PASS),
        (0.0199, Verdict.PASS),
        (0.0201, Verdict.REGRESSED),
        (1.0, Verdict.REGRESSED),
        (-0.005, Verdict.PASS),
        (-0.02, Verdict.IMPROVED),
    ],
)
def test_what_repeats_exactly_is_decided_by_the_tolerance(change, verdict):
    decision = Rule().look([math.log1p(change)] * 4, TOLERANCE, LEAST)
    assert decision.verdict == verdict
    assert decision.low == decision.estimate == decision.high == pytest.approx(change, abs=1e-15)


def test_equal_differences_have_no_spread_of_their_rounding():
    assert np.std([0.1] * 6) > 0  # or this shows nothing
    decision = Rule().look([0.1] * 6, TOLERANCE, LEAST)
    assert decision.low == decision.high


def test_sure_but_small_is_no_regression():
    # Surely more than 0, not surely less than the tolerance, and below the minimum effect.
    rule, limit = Rule(looks=(4, 6)), Limit(0.02, 0.02)
    tolerance, least = limit.at(1.0)
    assert rule.look(list(0.018 + 0.001 * SPREAD), tolerance, least) is None
    final = rule.look(list(0.018 + 0.001 * SPREAD), tolerance, least, last=True)
    assert final.verdict == Verdict.INCONCLUSIVE and final.low > 0 and final.high > 0.02


def test_what_may_be_faster_gets_more_rounds():
    rule = Rule()
    assert look(rule, -0.02, 0.005) is None
    assert look(rule, -0.02, 0.005, last=True).verdict == Verdict.PASS
    assert look(rule, -0.005, 0.005).verdict == Verdict.PASS


def test_the_last_look_decides():
    values = np.random.default_rng(0).normal(0.01, 0.05, 25)
    decision = Rule().look(list(values), TOLERANCE, LEAST)
    assert decision.verdict == Verdict.INCONCLUSIVE
    assert f"a standard deviation of {values.std(ddof=1):.2%}" in decision.reason


def test_many_tests_are_confirmed_more_strictly():
    rule = Rule(alpha=0.002, confirm=0.03, run_alpha=0.01)
    assert [rule.confirmation(n).alpha for n in (1, 100)] == [0.03, 0.03]
    # 0.002 * 1000 flags of identical code, each confirmed with 0.005: 0.01 in all.
    assert rule.confirmation(1000).alpha == pytest.approx(0.005)
    assert rule.confirmation(1000).looks == rule.fresh_looks
    # Those that pass by mistake in fresh rounds come to those that did before.
    assert rule.confirmation(1).miss == rule.miss / 3
    with pytest.raises(ValueError, match="n_tests: got 0"):
        rule.confirmation(0)


@pytest.mark.parametrize(
    "given",
    [
        {"alpha": 0.0},
        {"miss": 0.5},
        {"confirm": 1},
        {"run_alpha": -0.1},
        {"looks": ()},
        {"looks": (1, 2)},
        {"fresh_looks": (4, 4)},
    ],
    ids=str,
)
def test_a_rule_that_makes_no_sense_is_refused(given):
    with pytest.raises(ValueError, match=f"{next(iter(given))}: got"):
        Rule(**given)

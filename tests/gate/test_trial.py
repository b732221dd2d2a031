import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from stackwise.gate.limit import Limit
from stackwise.gate.sequential import Rule
from stackwise.gate.trial import Trial
from stackwise.gate.verdict import Verdict

RULE = Rule(looks=(4, 6), fresh_looks=(4, 6))
QUIET = (-0.001, 0.001, -0.001, 0.001)
WILD = (-0.1, 0.1, -0.1, 0.1)


def give(trial, differences):
    for difference in differences:
        trial.add(difference, 1e-3)


def around(change):
    return [math.log1p(change) + each for each in QUIET]


def test_no_change_passes_at_the_first_look():
    trial = Trial(Limit())
    assert (trial.decided, trial.decision) == (False, None)
    give(trial, QUIET[:3])
    assert not trial.decided
    give(trial, QUIET[3:])
    assert trial.decision.verdict == Verdict.PASS and not trial.decision.confirmed
    assert (trial.decided, trial.confirming) == (True, False)
    assert trial.differences == QUIET and trial.base_level == 1e-3


@pytest.mark.parametrize(
    ("change", "verdict"), [(0.05, Verdict.REGRESSED), (-0.05, Verdict.IMPROVED)], ids=["slower", "faster"]
)
def test_a_change_is_a_flag_until_fresh_rounds_say_the_same(change, verdict):
    trial = Trial(Limit(), RULE)
    give(trial, around(change))
    assert trial.confirming and not trial.decided
    # The estimate is of the fresh rounds: those that were chosen for being large are left out.
    give(trial, around(change / 2))
    assert trial.decision.verdict == verdict and trial.decision.confirmed
    assert trial.decision.rounds == 8 and trial.decision.estimate == pytest.approx(change / 2)
    assert "confirmed by 4 new ones" in trial.decision.reason


def test_a_flag_that_fresh_rounds_deny_passes():
    trial = Trial(Limit(), RULE)
    give(trial, around(0.05))
    give(trial, around(0.0))
    assert trial.decision.verdict == Verdict.PASS and not trial.decision.confirmed
    assert trial.decision.rounds == 8 and trial.decision.estimate == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("first", [0.05, -0.05], ids=["slower", "faster"])
def test_fresh_rounds_that_say_the_opposite_decide_nothing(first):
    trial = Trial(Limit(), RULE)
    give(trial, around(first))
    give(trial, around(-first))
    assert trial.decision.verdict == Verdict.INCONCLUSIVE


def test_slower_and_then_undecided_is_inconclusive():
    trial = Trial(Limit(), RULE)
    give(trial, around(0.05))
    give(trial, (*WILD, 0.1, -0.1))
    assert trial.decision.verdict == Verdict.INCONCLUSIVE and trial.decision.rounds == 10
    assert trial.decision.reason.startswith(
        "significantly higher cost after 4 rounds; in new rounds: undecided after 6"
    )


def test_faster_and_then_undecided_passes():
    # That it is not slower was shown by the first rounds.
    trial = Trial(Limit(), RULE)
    give(trial, around(-0.05))
    give(trial, (*WILD, 0.1, -0.1))
    assert trial.decision.verdict == Verdict.PASS
    assert trial.decision.estimate == pytest.approx(-0.05)


def test_bytes_that_repeat_exactly():
    trial = Trial(Limit(0.01, floor=65536.0))
    for _ in range(4):
        trial.add(0.0, 2.0**20)
    assert trial.decision.verdict == Verdict.PASS and trial.decision.high == 0
    trial = Trial(Limit(0.01, floor=65536.0))
    for _ in range(7):
        trial.add(math.log(1.2), 2.0**20)
    assert trial.decision.verdict == Verdict.REGRESSED
    assert trial.decision.low == trial.decision.high == pytest.approx(0.2)


def test_a_floor_lets_small_things_change():
    trial = Trial(Limit(floor=50e-6))
    for difference in around(0.2):
        trial.add(difference, 100e-6)  # 20 us more
    assert trial.decision.verdict == Verdict.PASS


def test_many_tests_ask_for_more_in_fresh_rounds():
    # At 4 rounds: about 5 standard errors, enough for 0.03 and too little for 0.0005.
    noisy = [math.log1p(0.05) + 20 * each for each in QUIET]
    few, many = (
        Trial(Limit(), Rule(looks=(4,), fresh_looks=(4,)), 1),
        Trial(Limit(), Rule(looks=(4,), fresh_looks=(4,)), 10_000),
    )
    for trial in (few, many):
        give(trial, around(0.05))
        give(trial, noisy)
    assert few.decision.verdict == Verdict.REGRESSED
    assert many.decision.verdict == Verdict.INCONCLUSIVE


def test_time_that_is_up_decides_nothing_by_itself():
    assert Trial(Limit()).conclude("the time is up").rounds == 0
    trial = Trial(Limit())
    give(trial, (0.05, 0.05))
    decision = trial.conclude("the time is up")
    assert trial.decided and trial.decision is decision
    assert decision.verdict == Verdict.INCONCLUSIVE and decision.estimate == pytest.approx(math.expm1(0.05))
    assert (decision.low, decision.high, decision.level) == (-math.inf, math.inf, 0.0)
    assert decision.reason == "2 rounds are too few for a decision; the time is up"
    assert Trial(Limit()).conclude("round 1 had no tpot").reason == "round 1 had no tpot"


def test_a_flag_without_the_time_for_fresh_rounds_is_inconclusive():
    trial = Trial(Limit())
    give(trial, around(0.05))
    decision = trial.conclude("the time is up")
    assert decision.verdict == Verdict.INCONCLUSIVE and decision.rounds == 4
    assert (
        "significantly higher cost after 4 rounds" in decision.reason and "the time is up" in decision.reason
    )


@pytest.mark.parametrize(
    ("change", "verdict"), [(0.03, Verdict.REGRESSED), (-0.03, Verdict.IMPROVED)], ids=["slower", "faster"]
)
def test_all_rounds_together_may_say_what_there_was_no_time_to_say_again(change, verdict):
    trial = Trial(Limit())
    rounds = [*around(change), *around(change * 2 / 3)[:2]]
    give(trial, rounds)
    assert trial.confirming and not trial.decided
    decision = trial.conclude("the time is up", together=True)
    assert (decision.verdict, decision.confirmed, decision.rounds) == (verdict, True, 6)
    # Student's interval of all six, at the chances of flag and confirmation multiplied.
    chance = 0.0025 * 0.05
    ends = stats.t(5, statistics.fmean(rounds), stats.sem(rounds)).interval(1 - 2 * chance)
    assert (decision.low, decision.high) == pytest.approx(tuple(map(math.expm1, ends)))
    assert decision.estimate == pytest.approx(math.expm1(statistics.fmean(rounds)))
    assert decision.level == 1 - 2 * chance
    assert decision.reason.endswith("after 4 rounds, and over all 6 together; the time is up")


def test_all_rounds_are_judged_together_only_where_that_is_asked():
    trial = Trial(Limit())
    give(trial, [*around(0.03), *around(0.03)[:2]])
    assert trial.conclude("interrupted").verdict == Verdict.INCONCLUSIVE


def test_bytes_that_repeat_exactly_want_one_fresh_round_more():
    found = []
    for fresh in (1, 2):
        trial = Trial(Limit(), RULE)
        give(trial, [0.05] * (4 + fresh))
        found.append(trial.conclude("the time is up", together=True).verdict)
    assert found == [Verdict.INCONCLUSIVE, Verdict.REGRESSED]


@pytest.mark.parametrize(
    "fresh", [[], [0.03, -0.03], [0.005, 0.006], [0.2, 0.03]], ids=["none", "denied", "small", "wild"]
)
def test_all_rounds_together_are_held_to_fresh_ones_and_to_more(fresh):
    trial = Trial(Limit())
    give(trial, around(0.03) + fresh)
    assert trial.conclude("the time is up", together=True).verdict == Verdict.INCONCLUSIVE


def test_what_the_last_look_proved_stays_proved():
    # Less than the tolerance for certain, perhaps faster: it waits for more rounds, which do not come.
    trial = Trial(Limit(), RULE)
    give(trial, [math.log1p(-0.02) + 5 * each for each in QUIET])
    give(trial, [0.5])
    assert not trial.decided and not trial.confirming
    assert trial.conclude("the time is up").verdict == Verdict.PASS


def test_a_decision_stays():
    trial = Trial(Limit())
    give(trial, QUIET)
    assert trial.conclude("the time is up") is trial.decision
    with pytest.raises(AssertionError, match="takes no more rounds"):
        trial.add(0.0, 1e-3)


@pytest.mark.parametrize(
    ("difference", "level", "key"),
    [(math.nan, 1.0, "difference"), (math.inf, 1.0, "difference"), (0.0, 0.0, "base_level")],
)
def test_what_is_no_round_is_refused(difference, level, key):
    with pytest.raises(ValueError, match=f"{key}: got"):
        Trial(Limit()).add(difference, level)


CENTRES = st.sampled_from([0.0, 0.01, 0.03, -0.03, 0.5])
ROUNDS = st.lists(st.floats(-1, 1), min_size=50, max_size=50)


@given(CENTRES, st.sampled_from([0.0, 1e-12, 0.003, 0.03, 1.0]), ROUNDS, st.integers(0, 50))
def test_what_a_verdict_says_is_in_its_numbers(centre, spread, rounds, most):
    trial = Trial(Limit())
    for each in rounds[:most]:
        if not trial.decided:
            trial.add(centre + spread * each, 1e-3)
    decision = trial.conclude("the time is up")
    assert decision.rounds == len(trial.differences) <= most
    assert math.isnan(decision.estimate) == (most == 0)
    match decision.verdict:
        case Verdict.REGRESSED:
            assert decision.confirmed and decision.low > 0 and decision.estimate > 0.01
        case Verdict.IMPROVED:
            assert decision.confirmed and decision.high < 0
        case Verdict.PASS:
            assert decision.high < 0.02 and not decision.confirmed
        case Verdict.INCONCLUSIVE:
            assert not decision.confirmed


def test_how_many_trials_there_are_may_be_said_until_the_flag():
    # 1.5 % slower in rounds that differ by 0.3 %: enough for one trial, too little for one of a million.
    fresh = [0.015 + 3 * each for each in QUIET]

    def verdict(before, after):
        trial = Trial(Limit(), RULE, n_tests=before)
        trial.is_one_of(after)
        give(trial, around(0.05))
        trial.is_one_of(1)  # too late
        give(trial, fresh)
        return trial.decision and trial.decision.verdict

    assert verdict(10**6, 1) == Verdict.REGRESSED
    assert verdict(1, 10**6) is None

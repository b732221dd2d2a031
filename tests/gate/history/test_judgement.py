"""Judgement: the verdict over a new result is Student's prediction interval, with the promised errors."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from stackwise.gate.history.judgement import judge
from stackwise.gate.history.point import Point, Result, Standing
from stackwise.gate.history.reference import ReferenceTime
from stackwise.gate.limit import Limit
from stackwise.gate.verdict import Verdict

LIMIT = Limit(0.02)
REFERENCE = ReferenceTime(1.0, 1.0)


def points(values, reference=REFERENCE, level=0.01):
    return [
        Point(number, None, "", "main", level, value, reference, Verdict.PASS, Standing.ACCEPTED)
        for number, value in enumerate(values)
    ]


def result(value, reference=REFERENCE, level=0.01):
    return Result("test", "time", level, value, reference)


def drawn(spread=0.003, count=20, seed=0):
    return np.random.default_rng(seed).normal(0, spread, count).tolist()


def test_the_interval_is_students_prediction_interval():
    values = drawn()
    found = judge(points(values), [result(0.03)], LIMIT).decision
    scale = np.std(values, ddof=1) * math.sqrt(1 + 1 / 20)
    low, high = stats.t.interval(0.98, 19, loc=0.03 - np.mean(values), scale=scale)
    assert found.estimate == pytest.approx(math.expm1(0.03 - np.mean(values)))
    assert (found.low, found.high) == pytest.approx((math.expm1(low), math.expm1(high)))
    assert (found.verdict, found.level, found.rounds) == (Verdict.REGRESSED, pytest.approx(0.98), 1)
    assert not found.confirmed


@pytest.mark.parametrize(
    "change, verdict, standing",
    [
        (0.0, Verdict.PASS, Standing.ACCEPTED),
        (0.005, Verdict.PASS, Standing.ACCEPTED),
        (0.016, Verdict.REGRESSED, Standing.EXCLUDED),
        (0.10, Verdict.REGRESSED, Standing.EXCLUDED),
        (-0.05, Verdict.IMPROVED, Standing.EXCLUDED),
    ],
)
def test_verdicts(change, verdict, standing):
    found = judge(points(drawn()), [result(change)], LIMIT)
    assert (found.decision.verdict, found.standing, found.points) == (verdict, standing, 20)


def test_runs_that_differ_too_much_tell_nothing():
    found = judge(points(drawn(spread=0.05)), [result(0.03)], LIMIT)
    assert found.decision.verdict is Verdict.INCONCLUSIVE and found.standing is Standing.PENDING
    assert "runs differ by" in found.decision.reason


def test_fewer_than_eight_are_collected_and_not_judged():
    found = judge(points(drawn(count=7)), [result(0.5)], LIMIT)
    assert found.decision.verdict is Verdict.INCONCLUSIVE and found.standing is Standing.ACCEPTED
    assert "7 results since the last change, and 8 are needed" in found.decision.reason
    nothing = judge([], [result(0.5)], LIMIT).decision
    assert math.isnan(nothing.estimate) and nothing.high == math.inf


def test_only_the_latest_segment_counts():
    values = drawn(count=20) + [value + 0.2 for value in drawn(count=12, seed=1)]
    found = judge(points(values), [result(0.2)], LIMIT)
    assert (found.decision.verdict, found.points) == (Verdict.PASS, 12)
    found = judge(points(values[:26]), [result(0.2)], LIMIT)
    assert (found.decision.verdict, found.points) == (Verdict.INCONCLUSIVE, 6)


def test_a_machine_that_is_another_today_tells_nothing():
    found = judge(points(drawn()), [result(0.5)], LIMIT, drifted="the copy of memory took 6 ms")
    assert found.decision.verdict is Verdict.INCONCLUSIVE and found.standing is Standing.EXCLUDED
    assert found.decision.reason == "the machine is not as it was: the copy of memory took 6 ms"


def test_results_with_and_without_reference_are_not_compared():
    history = points(drawn()) + points([5.0] * 10, reference=None)
    assert judge(history, [result(0.0)], LIMIT).points == 20
    found = judge(history, [result(5.0, reference=None)], LIMIT)
    assert (found.decision.verdict, found.points) == (Verdict.PASS, 10)
    with pytest.raises(ValueError, match="runs of one kind"):
        judge(history, [result(0.0), result(0.0, reference=None)], LIMIT)


@pytest.mark.parametrize(
    "change, verdict",
    [(0, Verdict.PASS), (64, Verdict.PASS), (2**20, Verdict.REGRESSED), (-(2**20), Verdict.IMPROVED)],
)
def test_bytes_that_are_always_the_same_are_judged_exactly(change, verdict):
    n_bytes = 2**24
    history = points([math.log(n_bytes)] * 8, reference=None, level=n_bytes)
    new = Result("test", "memory", float(n_bytes + change), math.log(n_bytes + change))
    found = judge(history, [new], Limit(0.01)).decision
    assert found.verdict is verdict
    assert found.low == found.estimate == found.high == pytest.approx(change / n_bytes)


def test_a_floor_lets_small_costs_change():
    history = points(drawn(), level=1e-4)
    assert judge(history, [result(0.1)], Limit(0.02)).decision.verdict is Verdict.REGRESSED
    assert judge(history, [result(0.1)], Limit(0.02, floor=5e-5)).decision.verdict is Verdict.PASS


@pytest.mark.parametrize(
    "second, verdict, confirmed",
    [(0.05, Verdict.REGRESSED, True), (0.0, Verdict.PASS, False)],
)
def test_a_flag_is_confirmed_by_a_second_run(second, verdict, confirmed):
    found = judge(points(drawn()), [result(0.05), result(second)], LIMIT).decision
    assert (found.verdict, found.confirmed, found.rounds) == (verdict, confirmed, 2)


def test_two_runs_that_contradict_each_other():
    found = judge(points(drawn()), [result(0.10), result(-0.10)], LIMIT)
    assert found.decision.verdict is Verdict.INCONCLUSIVE
    assert "contradict" in found.decision.reason


def test_many_results_without_a_second_run_are_held_to_more():
    one = judge(points(drawn()), [result(0.016)], LIMIT)
    many = judge(points(drawn()), [result(0.016)], LIMIT, n_tests=100_000)
    assert one.decision.verdict is Verdict.REGRESSED
    assert many.decision.verdict is not Verdict.REGRESSED
    assert many.decision.low < one.decision.low


def test_a_pass_needs_no_second_run():
    found = judge(points(drawn()), [result(0.0), result(0.5)], LIMIT).decision
    assert (found.verdict, found.rounds) == (Verdict.PASS, 1)


def verdicts(change, spread, second=False, count=400):
    """Of the same simulated history and a new run that costs `change` more, many times."""
    random = np.random.default_rng(7)
    found = Counter()
    for _ in range(count):
        values = random.normal(0, spread, 12)
        new = [result(float(each)) for each in random.normal(change, spread, 1 + second)]
        found[judge(points(values.tolist()), new, LIMIT).decision.verdict] += 1
    return found


def test_false_alarms_are_as_rare_as_promised():
    once = verdicts(0.0, 0.01)
    # 4 of 400 are expected; more than 11 with a chance of 0.1 %.
    assert once[Verdict.REGRESSED] <= 11
    assert verdicts(0.0, 0.01, second=True)[Verdict.REGRESSED] <= 2


def test_a_large_change_is_found_and_one_of_the_tolerance_seldom_passes():
    assert verdicts(math.log(1.10), 0.01)[Verdict.REGRESSED] >= 390
    assert verdicts(math.log(1.02), 0.004)[Verdict.PASS] <= 11


@pytest.mark.slow
def test_a_history_that_is_made_of_its_own_verdicts_stays_where_it_is():
    random = np.random.default_rng(9)
    found, means = Counter(), []
    for _ in range(8):
        history = []
        for _ in range(120):
            new = result(float(random.normal(0, 0.01)))
            accepted = [number for number, p in enumerate(history) if p.standing is Standing.ACCEPTED]
            newest = accepted[-1] + 1 if accepted else 0
            counted = [p for p in history[:newest] if p.standing is not Standing.EXCLUDED]
            said = judge(counted, [new], LIMIT)
            found[said.decision.verdict] += 1
            [point] = points([new.log_ratio])
            history.append(replace(point, verdict=said.decision.verdict, standing=said.standing))
        means.append(np.mean([p.log_ratio for p in counted]))
    # Runs that passed alone would be 0.8 standard deviations faster than all.
    assert abs(np.mean(means)) < 0.25 * 0.01
    # 1 % is promised of an unchanging segment; 960 runs.
    assert found[Verdict.REGRESSED] <= 0.03 * 960


def test_no_run_is_refused():
    with pytest.raises(ValueError, match="new: got 0"):
        judge([], [], LIMIT)

"""A run is held to the history of its machine, and a gate's findings are put into it."""

import math

import numpy as np
import pytest

from stackwise.gate.history.machine import Machine
from stackwise.gate.history.point import Standing
from stackwise.gate.history.record import judge_run, judged_results, results_of
from stackwise.gate.history.reference import ReferenceTime
from stackwise.gate.history.store import Store
from stackwise.gate.limit import Limit, Limits
from stackwise.gate.result import GateResult, TestResult, TrialResult
from stackwise.gate.verdict import Decision, Verdict

TEST = "bench/test_a.py::test_step"
LIMITS = Limits(time=Limit(0.02), memory=Limit(0.01))


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "history.db") as store:
        yield store


@pytest.fixture
def filled(store, make_run, make_result):
    """Twelve days of one test, whose runs differ by 0.3 %."""
    for number, value in enumerate(np.random.default_rng(5).normal(0, 0.003, 12).tolist()):
        store.add(make_run(number), [make_result(value, verdict=Verdict.PASS)])
    return store


def judged(store, run, result, **given):
    [found] = judge_run(store, run.machine, [result], LIMITS, **given).values()
    return found


@pytest.mark.parametrize(
    "change, verdict", [(0.0, Verdict.PASS), (0.05, Verdict.REGRESSED), (-0.05, Verdict.IMPROVED)]
)
def test_verdicts(filled, make_run, make_result, change, verdict):
    assert judged(filled, make_run(20), make_result(change)).decision.verdict is verdict


def test_a_commit_is_not_held_to_itself(filled, make_run, make_result):
    found = judged(filled, make_run(20), make_result(), commit=make_run(11).commit)
    assert found.points == 11
    assert judged(filled, make_run(20), make_result()).points == 12


def test_nothing_is_stored_by_judging(filled, make_run, make_result, machine):
    judged(filled, make_run(20), make_result())
    assert len(filled.points(machine, TEST, "time")) == 12


def test_another_machine_has_no_history(filled, make_run, make_result, fingerprint):
    run = make_run(20, machine=Machine.of(fingerprint | {"torch": "2.12.0"}))
    found = judged(filled, run, make_result(0.5))
    assert (found.decision.verdict, found.points) == (Verdict.INCONCLUSIVE, 0)


def test_a_feature_is_held_to_main(filled, make_run, make_result):
    found = judged(filled, make_run(20, branch="feature"), make_result(0.05))
    assert found.decision.verdict is Verdict.REGRESSED
    assert judged(filled, make_run(20), make_result(0.05), branch="feature").points == 0


def test_a_machine_that_is_as_slow_in_all_is_no_regression(filled, make_run, make_result):
    # Twice the seconds of test and reference: the ratio is the same, and the machine another.
    found = judged(filled, make_run(20), make_result(0.0, reference=ReferenceTime(2e-3, 8e-3)))
    assert found.decision.verdict is Verdict.INCONCLUSIVE and found.standing is Standing.EXCLUDED
    assert "the product of matrices took 2 ms where 0.98 to 1.02 ms were expected" in found.decision.reason


def test_slow_drift_is_no_regression_and_no_alarm(store, make_run, make_result):
    for number in range(30):
        reference = ReferenceTime(1e-3 * 1.01**number, 4e-3 * 1.01**number)
        result = make_result(0.001 * (-1) ** number, reference=reference)
        found = judge_run(store, make_run(number).machine, [result], LIMITS)
        store.add(make_run(number), judged_results([result], found))
        [said] = found.values()
        assert said.decision.verdict is (Verdict.INCONCLUSIVE if number < 8 else Verdict.PASS), number


def test_regressions_that_are_measured_often_do_not_become_usual(filled, make_run, make_result, machine):
    for number in range(20, 40):
        result = make_result(0.05)
        found = judge_run(filled, make_run(number).machine, [result], LIMITS)
        filled.add(make_run(number), judged_results([result], found))
        assert [each.decision.verdict for each in found.values()] == [Verdict.REGRESSED]
    newest = filled.points(machine, TEST, "time")[-1]
    assert (newest.verdict, newest.standing) == (Verdict.REGRESSED, Standing.EXCLUDED)
    filled.accept(machine, TEST, "time", newest, "the model is larger")
    found = judged(filled, make_run(41), make_result(0.05))
    assert (found.decision.verdict, found.points) == (Verdict.INCONCLUSIVE, 1)


def test_a_second_run_confirms(filled, make_run, make_result):
    found = judged(filled, make_run(20), make_result(0.05), again=[make_result(0.06)]).decision
    assert (found.verdict, found.confirmed) == (Verdict.REGRESSED, True)


def test_metrics_without_a_limit_are_stored_and_not_judged(filled, make_run, make_result):
    limits = {TEST: Limits(time=None)}
    assert judge_run(filled, make_run(20).machine, [make_result()], limits) == {}
    result = make_result()
    assert judged_results([result], {}) == [result]
    with pytest.raises(ValueError, match=r"those of bench/test_a.py::test_step too"):
        judge_run(filled, make_run(20).machine, [result], {"other": Limits()})


def trial(verdict, head, unit="s"):
    decision = Decision(verdict, 0.0, -0.01, 0.01, 0.98, len(head), confirmed=False, reason="")
    return TrialResult(decision, unit, 0.02, 0.01, (0.0,) * len(head), head, head)


def test_what_a_gate_found_of_head():
    gate = GateResult(
        "base",
        "head",
        (
            TestResult(
                "a",
                trials={
                    "time": trial(Verdict.REGRESSED, (1.0, 4.0, 2.0)),
                    "tpot": trial(Verdict.INCONCLUSIVE, ()),  # of which no round had a number
                },
            ),
            TestResult("b", trials={"memory": trial(Verdict.PASS, (100.0, 100.0), "B")}),
            TestResult("c", "crashed on head"),
        ),
    )
    time, memory = results_of(gate)
    assert (time.test, time.metric, time.level) == ("a", "time", 2.0)
    assert (time.log_ratio, time.reference, time.verdict) == (math.log(2.0), None, Verdict.REGRESSED)
    assert memory.log_ratio == math.log(100.0) and memory.verdict is Verdict.PASS


def test_results_are_relative_to_the_reference_of_their_rounds():
    def gate(*reference):
        time = trial(Verdict.REGRESSED, (1.0, 4.0, 2.0))
        memory = trial(Verdict.PASS, (100.0, 100.0), "B")
        test = TestResult("a", trials={"time": time, "memory": memory}, reference=reference)
        return GateResult("base", "head", (test,))

    # The last one is of a round after the time was decided.
    time, memory = results_of(gate((1.0, 1.0), (2.0, 2.0), (4.0, 1.0), (9.0, 9.0)))
    assert time.log_ratio == 0.0 and time.reference == ReferenceTime(2.0, 1.0)
    assert memory.reference is None
    with pytest.raises(ValueError, match="references of a: got 1; allowed: one for each of 3 rounds"):
        results_of(gate((1.0, 1.0)))

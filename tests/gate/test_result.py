import json
import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.gate.result import (
    EXIT_INCONCLUSIVE,
    EXIT_NOTHING,
    GateResult,
    Missing,
    Status,
    TestResult,
    TrialResult,
)
from stackwise.gate.verdict import Decision, Verdict

COSTS = st.lists(st.floats(1e-9, 1e12), max_size=5).map(tuple)
TEXT = st.text(max_size=20)
BROKEN = [status for status in get_args(Status) if status != "measured"]


def decision(verdict, estimate=0.0):
    return Decision(verdict, estimate, estimate - 0.01, estimate + 0.01, 0.97, 4, False, "")


def trial(verdict=Verdict.PASS):
    return TrialResult(decision(verdict), "s", 0.02, 0.01, (0.0,) * 4, (1e-3,) * 4, (1e-3,) * 4)


def measured(nodeid, *verdicts):
    metrics = ("time", "memory", "ttft", "tpot")
    return TestResult(nodeid, trials=dict(zip(metrics, map(trial, verdicts), strict=False)))


def gate(*tests, **options):
    return GateResult("main", "head", tests, **options)


DECISIONS = st.builds(decision, st.sampled_from(Verdict), st.floats(-0.9, 10))
TRIALS = st.builds(
    TrialResult,
    DECISIONS,
    st.sampled_from(["s", "B"]),
    st.floats(1e-6, 1),
    st.floats(0, 1),
    st.lists(st.floats(-5, 5), max_size=5).map(tuple),
    COSTS,
    COSTS,
)
METRICS = st.sampled_from(["time", "memory", "ttft", "tpot"])


@st.composite
def some_tests(draw):
    status = draw(st.sampled_from(get_args(Status)))
    found = draw(st.dictionaries(METRICS, TRIALS, min_size=1)) if status == "measured" else {}
    lines, times, counts = st.integers(0, 10_000), st.floats(1e-9, 1e3), st.integers(0, 10**9)
    return TestResult(
        draw(TEXT),
        status,
        found,
        draw(TEXT),
        draw(TEXT),
        draw(lines),
        draw(st.floats(0, 1e6)),
        draw(st.lists(st.tuples(times, times), max_size=3).map(tuple)),
        draw(st.tuples(counts, counts)),
    )


SHARES = st.none() | st.floats(-1, 1)
GATES = st.builds(
    GateResult,
    TEXT,
    TEXT,
    st.lists(some_tests(), max_size=4, unique_by=lambda test: test.nodeid).map(tuple),
    st.floats(0, 1e6),
    st.integers(0, 1000),
    st.sampled_from(get_args(Missing)),
    st.dictionaries(TEXT, st.none() | st.integers() | TEXT, max_size=3),
    st.integers(),
    SHARES,
    SHARES,
    st.lists(TEXT, max_size=3).map(tuple),
)


@given(GATES)
def test_a_result_is_the_same_after_json(result):
    text = json.dumps(result.to_dict(), allow_nan=False)
    assert GateResult.from_dict(json.loads(text)) == result


def test_what_is_not_known_is_none_in_json():
    values = gate(order_bias=math.nan, balance=math.nan).to_dict()
    assert values["order_bias"] is None and values["balance"] is None


@pytest.mark.parametrize("version", [0, 2, "1", None], ids=repr)
def test_another_form_is_refused(version):
    values = gate().to_dict() | {"version": version}
    with pytest.raises(ValueError, match=r"version: got .*; allowed: 1"):
        GateResult.from_dict(values)


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [
        (("PASS", "PASS"), "PASS"),
        (("PASS", "IMPROVED"), "IMPROVED"),
        (("IMPROVED", "INCONCLUSIVE"), "INCONCLUSIVE"),
        (("INCONCLUSIVE", "REGRESSED", "IMPROVED"), "REGRESSED"),
    ],
    ids=str,
)
def test_a_test_is_as_good_as_the_worst_of_its_metrics(verdicts, worst):
    assert measured("a", *map(Verdict, verdicts)).verdict == worst


@pytest.mark.parametrize(
    ("status", "outcomes"),
    [
        ("crashed on head", ["failed"] * 3),
        ("hung on head", ["failed"] * 3),
        ("set-up error", ["error"] * 3),
        ("crashed on base", ["inconclusive"] * 3),
        ("hung on base", ["inconclusive"] * 3),
        ("skipped on head", ["inconclusive"] * 3),
        ("not begun", ["inconclusive"] * 3),
        ("not measured", ["inconclusive"] * 3),
        ("missing on head", ["warned"] * 3),
        ("skipped", ["passed"] * 3),
        ("unused", ["passed"] * 3),
        ("missing on base", ["failed", "warned", "passed"]),
    ],
)
def test_what_was_not_measured(status, outcomes):
    test = TestResult("a", status)
    assert [test.outcome(missing) for missing in ("fail", "warn", "create")] == outcomes
    assert test.verdict == Verdict.INCONCLUSIVE


def test_every_status_has_been_thought_of():
    assert {TestResult("a", status).outcome("fail") for status in BROKEN} == {
        "failed",
        "error",
        "inconclusive",
        "warned",
        "passed",
    }


@pytest.mark.parametrize(
    ("found", "outcome", "verdict", "code"),
    [
        ([Verdict.PASS], "passed", "PASS", 0),
        ([Verdict.PASS, Verdict.IMPROVED], "passed", "IMPROVED", 0),
        ([Verdict.INCONCLUSIVE, Verdict.IMPROVED], "inconclusive", "INCONCLUSIVE", 7),
        ([Verdict.PASS, Verdict.REGRESSED, Verdict.INCONCLUSIVE], "failed", "REGRESSED", 1),
        ([], "inconclusive", "INCONCLUSIVE", 5),
    ],
    ids=["pass", "improved", "inconclusive", "regressed", "nothing"],
)
def test_a_run_is_as_good_as_the_worst_of_its_tests(found, outcome, verdict, code):
    result = gate(*(measured(str(place), each) for place, each in enumerate(found)))
    assert (result.outcome, result.verdict, result.exit_code) == (outcome, verdict, code)


def test_a_crash_fails_the_run():
    result = gate(measured("a", Verdict.PASS), TestResult("b", "crashed on head"))
    assert (result.outcome, result.verdict, result.exit_code) == ("failed", "FAILED", 1)


@pytest.mark.parametrize(
    ("other", "verdict", "code"),
    [
        (measured("b", Verdict.PASS), "ERROR", 4),
        (measured("b", Verdict.INCONCLUSIVE), "ERROR", 4),
        (measured("b", Verdict.REGRESSED), "REGRESSED", 1),
        (TestResult("b", "crashed on head"), "FAILED", 1),
        (TestResult("b", "skipped"), "ERROR", 4),
    ],
    ids=["pass", "inconclusive", "regressed", "crashed", "nothing compared"],
)
def test_set_up_error_is_no_regression(other, verdict, code):
    result = gate(TestResult("a", "set-up error"), other)
    assert (result.verdict, result.exit_code) == (verdict, code)


def test_a_warning_does_not():
    result = gate(measured("a", Verdict.PASS), TestResult("b", "missing on base"), missing="warn")
    assert (result.outcome, result.verdict, result.exit_code) == ("warned", Verdict.PASS, 0)
    assert replace(result, missing="fail").exit_code == 1


@pytest.mark.parametrize(
    ("statuses", "missing", "code"),
    [
        (["skipped"], "warn", 5),
        (["crashed on base", "not begun"], "warn", 5),
        (["missing on base"], "warn", 5),
        (["missing on base"], "create", 0),
        (["missing on base", "not begun"], "create", 7),
        (["skipped", "crashed on head"], "warn", 1),
    ],
)
def test_where_nothing_was_compared_is_no_matter_of_doubt(statuses, missing, code):
    tests = [TestResult(str(place), status) for place, status in enumerate(statuses)]
    assert gate(*tests, missing=missing).exit_code == code
    # With one that was compared, doubt is doubt.
    more = gate(*tests, measured("a", Verdict.INCONCLUSIVE), missing=missing)
    assert more.compared and more.exit_code == (1 if code == 1 else 7)


def test_what_has_no_estimate_was_not_compared():
    unknown = Decision(Verdict.INCONCLUSIVE, math.nan, -math.inf, math.inf, 0.0, 1, False, "another machine")
    result = gate(TestResult("a", trials={"time": replace(trial(), decision=unknown, base=())}))
    assert not result.compared and result.exit_code == EXIT_NOTHING
    again = GateResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert not again.compared


def test_the_exit_code_of_doubt_is_none_of_pytests_own():
    assert EXIT_INCONCLUSIVE == 7
    assert EXIT_INCONCLUSIVE not in {int(code) for code in pytest.ExitCode}
    assert EXIT_NOTHING == pytest.ExitCode.NO_TESTS_COLLECTED


def test_tokens_per_second_are_those_of_the_time():
    slower = replace(trial(), decision=decision(Verdict.REGRESSED, 0.25), base=(0.5, 0.4, 0.6))
    told = TestResult("a", trials={"memory": trial(), "time": slower}, tokens=(100, 100))
    assert told.tokens_per_second == pytest.approx((200.0, 160.0))
    values = told.to_dict()
    assert values["tokens_per_second"] == pytest.approx([200.0, 160.0])
    for less in (
        replace(told, tokens=(0, 100)),
        replace(told, trials={"memory": trial()}),
        replace(told, trials={"time": replace(slower, base=())}),
    ):
        assert less.tokens_per_second is None and less.to_dict()["tokens_per_second"] is None


def test_trials_come_with_a_measurement_alone():
    with pytest.raises(ValueError, match="trials: got"):
        TestResult("a", "measured")
    with pytest.raises(ValueError, match=r"trials: got \['time'\]"):
        TestResult("a", "hung on head", {"time": trial()})


def test_names_that_are_not_known_are_refused():
    with pytest.raises(ValueError, match="status: got 'fine'"):
        TestResult("a", "fine")
    with pytest.raises(ValueError, match="missing: got 'ignore'"):
        gate(missing="ignore")
    with pytest.raises(ValueError, match="tests: got"):
        gate(measured("a", Verdict.PASS), measured("a", Verdict.PASS))


def test_suite_that_is_slower_fails_a_run_whose_tests_are_open():
    suite = measured("(all tests together)", Verdict.REGRESSED)
    result = replace(gate(measured("a", Verdict.INCONCLUSIVE)), suite=suite)
    assert (result.outcome, result.verdict, result.exit_code) == ("failed", "REGRESSED", 1)
    assert GateResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result

"""Page of a gate: findings first, then the paired differences, then all tests."""

import math
from dataclasses import replace

import pytest

from stackwise.gate.page import gate_page
from stackwise.gate.result import GateResult, TestResult, TrialResult
from stackwise.gate.verdict import Decision, Verdict


def trial(verdict, change, reason="because"):
    decision = Decision(verdict, change, change - 0.01, change + 0.01, 0.97, 8, False, reason)
    return TrialResult(decision, "s", 0.02, 0.01, (math.log1p(change),) * 8, (0.0012,) * 8, (0.0013,) * 8)


SLOWER = TestResult("b.py::step", trials={"time": trial(Verdict.REGRESSED, 0.05)}, file="b.py", line=12)
OPEN = TestResult("b.py::open", trials={"time": trial(Verdict.INCONCLUSIVE, 0.01)})
FINE = TestResult("b.py::fine", trials={"time": trial(Verdict.PASS, 0.001)})
CRASHED = TestResult("b.py::crash", "crashed on head", detail="boom")
RESULT = GateResult("main (0123abcde)", "working tree at 4567", (FINE, OPEN, SLOWER, CRASHED), 61.0, 8)


def sections(result):
    return {section.title: section for section in gate_page(result).sections}


def test_page_begins_with_the_verdict():
    page = gate_page(RESULT)
    assert (page.verdict, page.status) == ("REGRESSED", "failed")
    assert page.title == "Performance of working tree at 4567 against main (0123abcde)"
    assert page.summary.startswith("working tree at 4567 against main")


def test_findings_come_before_plots_and_tests():
    assert list(sections(RESULT)) == [
        "Failed tests",
        "Inconclusive tests and warnings",
        "Paired differences",
        "All tests",
    ]


def test_regression_shows_place_evidence_advice_and_command():
    finding, _ = sections(RESULT)["Failed tests"].findings
    assert finding.where == "b.py:12"
    assert (finding.label, finding.message) == ("REGRESSED", "time: because")
    assert finding.evidence == "time 1.2 ms -> 1.26 ms, +5.00% [+4.00%, +6.00%], tolerance 2%"
    assert "raise the tolerance" in finding.advice
    assert finding.command == "stackwise gate main --tests b.py::step"


def test_command_names_a_head_that_is_a_revision():
    finding, _ = sections(replace(RESULT, head="feature (89abcdef0)"))["Failed tests"].findings
    assert finding.command == "stackwise gate main feature --tests b.py::step"


def test_saved_results_have_no_command():
    stored = replace(RESULT, notes=("stored: base was not measured beside head",))
    assert {finding.command for finding in sections(stored)["Failed tests"].findings} == {""}


def test_test_that_crashed_shows_its_output():
    _, finding = sections(RESULT)["Failed tests"].findings
    assert (finding.label, finding.message) == ("crashed on head", "boom")


def test_plots_are_one_of_all_tests_and_one_of_each_with_rounds():
    titles = [plot.title for plot in sections(RESULT)["Paired differences"].plots]
    assert titles == [
        "Change by test and metric",
        "REGRESSED: time of b.py::step",
        "INCONCLUSIVE: time of b.py::open",
        "PASS: time of b.py::fine",
    ]


def test_plots_show_interval_and_tolerance():
    pytest.importorskip("matplotlib")
    overview, rounds, *_ = sections(RESULT)["Paired differences"].plots
    svg = rounds.svg("p")
    for label in ("interval", "estimate", "tolerance", "round"):
        assert f">{label}" in svg
    assert overview.svg("q").startswith("<svg")


@pytest.mark.parametrize("differences", [(0.01,), (0.0,) * 8], ids=["one round", "no change"])
def test_rounds_without_information_are_not_drawn(differences):
    equal = replace(FINE.trials["time"], differences=differences)
    result = replace(RESULT, tests=(SLOWER, replace(FINE, trials={"memory": equal})))
    titles = [plot.title for plot in sections(result)["Paired differences"].plots]
    assert titles == ["Change by test and metric", "REGRESSED: time of b.py::step"]


def test_tolerance_far_above_all_rounds_is_not_drawn():
    pytest.importorskip("matplotlib")
    floor = replace(FINE.trials["time"], tolerance=400.0)
    result = replace(RESULT, tests=(SLOWER, replace(FINE, trials={"memory": floor})))
    overview, _, rounds = sections(result)["Paired differences"].plots
    assert rounds.caption.endswith("The tolerance (480 ms) is outside of the plot.")
    assert ">tolerance" not in rounds.svg("p")
    assert ">20000" not in overview.svg("q")


def test_all_tests_are_in_the_table():
    [table] = sections(RESULT)["All tests"].tables
    assert [(row.cells[0], row.label, row.status) for row in table.rows] == [
        ("b.py::fine", "PASS", "passed"),
        ("b.py::open", "INCONCLUSIVE", "warning"),
        ("b.py::step", "REGRESSED", "failed"),
        ("b.py::crash", "crashed on head", "failed"),
    ]


def test_gate_without_measurements_has_no_plots():
    assert list(sections(replace(RESULT, tests=(CRASHED,)))) == ["Failed tests", "All tests"]

"""The projects in which the gate is tried, and how a run in one of them is judged."""

import pytest

from bench.gate.adoption import Attempt, bars, judge
from bench.gate.layouts import LAYOUTS, Layout

PLAIN, REFUSED = Layout("plain"), Layout("refused", refusal="pip install -e .")


def line(verdict):
    return f"{verdict}: working tree at 1 against base (2): 1 {verdict}; 4 rounds in 9 s\n"


@pytest.mark.parametrize(
    "head, code, printed, expected",
    [
        ("equal", 0, line("PASS"), "decided"),
        ("equal", 1, line("REGRESSED"), "wrong"),
        ("equal", 0, line("IMPROVED"), "wrong"),
        ("equal", 7, line("INCONCLUSIVE"), "undecided"),
        ("equal", 1, line("FAILED"), "broken"),
        ("slower", 1, line("REGRESSED"), "decided"),
        ("slower", 0, line("PASS"), "wrong"),
        ("slower", 0, "", "wrong"),
        ("slower", 3, "INTERNALERROR> Traceback", "broken"),
        ("slower", 4, "ERROR: unknown option", "broken"),
    ],
)
def test_kind_of_an_attempt(head, code, printed, expected):
    assert judge(PLAIN, head, code, printed)[1] == expected


def test_a_refusal_needs_its_remedy():
    assert judge(REFUSED, "equal", 4, "set-up error: run pip install -e .")[1] == "refused"
    assert judge(REFUSED, "equal", 4, "set-up error")[1] == "broken"
    assert judge(PLAIN, "equal", 4, "set-up error: run pip install -e .")[1] == "broken"


def test_bars_count_projects_that_are_decided_on_both_heads():
    kinds = {"one": ["decided", "decided"], "two": ["decided", "refused"], "three": ["wrong", "broken"]}
    attempts = [
        Attempt(name, head, 0, "PASS", kind, 1.0, "")
        for name, both in kinds.items()
        for head, kind in zip(("equal", "slower"), both, strict=True)
    ]
    found = {bar.name.removeprefix("adoption: "): bar.value for bar in bars(attempts, limited_seconds=61.5)}
    assert found["seconds of a run with a limit of 60 s"] == 61.5
    assert found["wrong verdicts"] == found["broken runs"] == 1
    assert found["projects"] == 3
    assert found["share decided on both heads"] == pytest.approx(1 / 3)


def test_there_are_forty_projects_of_different_names():
    names = [layout.name for layout in LAYOUTS]
    assert len(names) == len(set(names)) >= 40


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_slower_head_differs(layout):
    assert layout.base != layout.slower
    assert layout.code not in layout.files

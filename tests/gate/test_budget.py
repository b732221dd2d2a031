"""Which tests get another round when the time of a run is short."""

from types import SimpleNamespace

import pytest

from stackwise.gate import budget as budget_module
from stackwise.gate.budget import Budget
from stackwise.gate.limit import Limits
from stackwise.gate.open_test import OpenTest
from stackwise.gate.sequential import Rule

ROUND = ((True,), (0.0,))  # of a test's order


@pytest.fixture
def budget(monkeypatch):
    """100 seconds, of which none has passed."""
    monkeypatch.setattr(budget_module, "real_time", SimpleNamespace(monotonic=lambda: 0.0))
    return Budget(100.0, Rule())


def open_tests(seconds, *, rounds=1):
    return [
        OpenTest(str(number), Limits(), round_seconds=each, order=[ROUND] * rounds)
        for number, each in enumerate(seconds)
    ]


def names(tests):
    return [test.nodeid for test in tests]


def test_without_a_limit_everything_fits():
    unlimited = Budget(None, Rule())
    assert unlimited.suffices(1e9)
    assert unlimited.admits(1e9, next_seconds=1e9)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_limit_that_is_none_is_refused(seconds):
    with pytest.raises(ValueError, match="most_seconds"):
        Budget(seconds, Rule())


def test_time_that_is_spent_before_is_missing_in_the_rounds(budget):
    assert budget.suffices(100.0)
    begun_late = Budget(100.0, Rule(), spent=40.0)
    assert begun_late.elapsed == 40.0
    assert begun_late.suffices(60.0) and not begun_late.suffices(60.1)


@pytest.mark.parametrize("next_seconds, expected", [(105.0, True), (105.1, False)])
def test_a_round_goes_on_if_its_next_test_exceeds_the_limit_by_5_percent(budget, next_seconds, expected):
    assert budget.goes_on(next_seconds) is expected
    assert Budget(None, Rule()).goes_on(1e9)


@pytest.mark.parametrize("lasted, expected", [(19.0, True), (19.1, False)])
def test_a_test_is_begun_if_five_rounds_fit(budget, lasted, expected):
    # Four to the first look, and one that confirms. The first of them has lasted already.
    assert budget.admits(lasted, next_seconds=4.8) is expected


def test_the_last_tests_are_given_up_before_their_first_look(budget):
    assert names(budget.keep(open_tests([10.0] * 4), around=2.0)) == ["0", "1"]


def test_tests_after_their_first_look_are_kept(budget):
    assert len(budget.keep(open_tests([60.0] * 4, rounds=4), around=2.0)) == 4


def test_a_round_has_the_tests_that_fit(budget):
    assert names(budget.choose(open_tests([60.0, 60.0, 30.0]), around=5.0)) == ["0", "2"]
    assert budget.choose(open_tests([99.0]), around=5.0) == []


def test_flagged_tests_come_first(budget, monkeypatch):
    monkeypatch.setattr(OpenTest, "confirming", property(lambda test: test.nodeid == "2"))
    assert names(budget.choose(open_tests([60.0, 30.0, 60.0]), around=5.0)) == ["1", "2"]

"""Retention: the last, every so many-th and the best stay; the newest always does."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.checkpoint.retention import Retention


def test_each_rule():
    metrics = {0: 5.0, 9: 1.0, 10: None, 100: 3.0, 1000: 2.0, 1001: 2.5}
    assert Retention(keep_last=1).kept(metrics) == {1001}
    assert Retention(keep_last=2).kept(metrics) == {1000, 1001}
    assert Retention(keep_last=1, keep_every=100).kept(metrics) == {0, 100, 1000, 1001}
    assert Retention(keep_last=1, keep_best=2).kept(metrics) == {9, 1000, 1001}
    assert Retention(keep_last=1, keep_best=2, lower_is_better=False).kept(metrics) == {0, 100, 1001}
    assert Retention(keep_last=9).kept(metrics) == set(metrics)


def test_of_equal_metrics_the_newest():
    metrics = {1: 2.0, 2: 2.0, 3: 7.0}
    assert Retention().ranked(metrics) == [2, 1, 3]
    assert Retention(lower_is_better=False).ranked(metrics) == [3, 2, 1]


def test_a_metric_that_is_no_number_is_never_best():
    metrics = {1: math.nan, 2: math.inf, 3: -math.inf, 4: None, 5: 9.0}
    assert Retention().ranked(metrics) == [5]
    assert Retention(keep_last=1, keep_best=3).kept(metrics) == {5}


@given(
    st.dictionaries(st.integers(0, 50), st.none() | st.floats(), min_size=1),
    st.integers(1, 4),
    st.none() | st.integers(1, 5),
    st.integers(0, 3),
    st.booleans(),
)
def test_newest_checkpoints_always_stay(metrics, last, every, best, lower):
    kept = Retention(last, every, best, lower).kept(metrics)
    assert set(sorted(metrics)[-last:]) <= kept <= set(metrics)
    assert all(step in kept for step in metrics if every and step % every == 0)


@pytest.mark.parametrize(
    "wrong",
    [{"keep_last": 0}, {"keep_last": True}, {"keep_every": 0}, {"keep_best": -1}, {"lower_is_better": 1}],
    ids=str,
)
def test_refused(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: got"):
        Retention(**wrong)

"""Who is first: balanced in every round, and looked at afterwards."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.gate.turns import check_order, turns


@given(pairs=st.integers(0, 99), seed=st.integers(0, 1000))
def test_nobody_is_first_more_often_than_by_one(pairs, seed):
    order = turns(pairs, random.Random(seed))
    assert len(order) == pairs
    assert abs(2 * sum(order) - pairs) == pairs % 2
    assert all(one != other for one, other in itertools.pairwise(order))


def test_who_starts_is_by_chance():
    rng = random.Random(0)
    starts = [turns(5, rng)[0] for _ in range(1000)]
    assert 430 < sum(starts) < 570  # five standard deviations


def test_what_being_first_is_worth():
    # The first is 1 % faster; the head by itself 3 % slower.
    order = turns(40, random.Random(3))
    logs = [0.03 + (-0.01 if head_first else 0.01) for head_first in order]
    found = check_order([(order, logs)])
    assert found.bias == pytest.approx(0.01)
    assert (found.pairs, found.head_first, found.balanced) == (40, 20, True)


def test_a_fixed_order_is_found_out():
    found = check_order([(turns(10, random.Random(0), "fixed"), [0.0] * 10)])
    assert not found.balanced
    assert found.head_first == 0
    assert math.isnan(found.bias)


def test_one_unbalanced_round_among_balanced_ones_is_found_out():
    good = turns(10, random.Random(0))
    assert check_order([(good, [0.0] * 10)] * 9).balanced
    assert not check_order([*[(good, [0.0] * 10)] * 9, ([True] * 10, [0.0] * 10)]).balanced

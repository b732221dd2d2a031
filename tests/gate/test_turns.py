"""Who is first: balanced in every round, and looked at afterwards."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.gate.turns import check_order, difference, standard_error, turns


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
    assert (found.balance, found.balanced) == (0.5, True)


def test_a_fixed_order_is_found_out():
    found = check_order([(turns(10, random.Random(0), "fixed"), [0.0] * 10)])
    assert not found.balanced
    assert found.balance == 1
    assert found.bias is None


def test_one_unbalanced_round_among_balanced_ones_is_found_out():
    good = turns(10, random.Random(0))
    assert check_order([(good, [0.0] * 10)] * 9).balanced
    assert not check_order([*[(good, [0.0] * 10)] * 9, ([True] * 10, [0.0] * 10)]).balanced


def test_the_difference_is_the_mean_of_the_medians_of_both_orders():
    order = [True, False, True, False, True]
    assert difference([0.1, 0.5, 0.2, 0.7, 0.9], order) == pytest.approx((0.2 + 0.6) / 2)
    assert difference([0.3], [True]) == 0.3
    assert difference([0.3, 0.5, 0.9], [False] * 3) == 0.5


@pytest.mark.parametrize("pairs", [26, 52, 192])
def test_the_standard_error_is_that_of_the_difference(pairs):
    rng = np.random.default_rng(pairs)
    order = turns(pairs, random.Random(0))
    rounds = [list(0.01 * rng.standard_normal(pairs) + 0.1 * np.array(order)) for _ in range(1000)]
    # Both vary by chance: a spread of 1000 by 2.2 %; medians of so few are a little better than of many.
    spread = np.std([difference(each, order) for each in rounds])
    assert np.mean([standard_error(each, order) for each in rounds]) == pytest.approx(spread, rel=0.12)


def test_single_pairs_do_not_count_for_the_standard_error():
    order = turns(26, random.Random(0))
    assert standard_error([0.0] * 25 + [5.0], order) == 0.0
    assert standard_error([0.1 * first for first in order], order) == 0.0
    assert standard_error([0.3], [True]) == 0.0

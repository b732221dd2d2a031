"""Dimensions: what is drawn lies within them, and what is none is refused."""

import random

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.prototype.search.dimension import Choices, Range, read_dimension


@pytest.mark.parametrize(
    "plain, values",
    [
        ({"low": 2, "high": 10, "step": 4}, {2, 6, 10}),
        ({"low": 1, "high": 3}, {1, 2, 3}),
        ({"low": 0.5, "high": 1.5, "step": 0.5}, {0.5, 1.0, 1.5}),
        ({"low": 1, "high": 4, "log": True}, {1, 2, 3, 4}),
        ({"low": 7, "high": 7}, {7}),
        (["a", None, [1, None]], None),
    ],
)
def test_all_values_are_drawn_and_no_others(plain, values):
    dimension = read_dimension(plain)
    source = random.Random(0)
    drawn = [dimension.draw(source) for _ in range(300)]
    if values is None:
        assert all(value in drawn for value in plain) and all(value in plain for value in drawn)
    else:
        assert set(drawn) == values == set(dimension.lattice())
        assert {type(value) for value in drawn} == {type(min(values))}
    assert dimension.count == len(values or plain)
    assert read_dimension(dimension.to_plain()) == dimension


@given(st.floats(1e-6, 1e3), st.floats(1.0, 1e4), st.booleans(), st.integers())
def test_a_continuous_range_is_kept(low, ratio, log, seed):
    dimension = read_dimension({"low": low, "high": low * ratio, "log": log})
    assert low <= dimension.draw(random.Random(seed)) <= low * ratio
    lattice = dimension.lattice()
    assert lattice == sorted(lattice) and low <= lattice[0] and lattice[-1] <= low * ratio
    assert dimension.count is None or ratio == 1.0 or dimension.low == dimension.high


def test_log_draws_are_uniform_in_the_logarithm():
    dimension = read_dimension({"low": 1e-4, "high": 1e-2, "log": True})
    source = random.Random(0)
    below = sum(dimension.draw(source) < 1e-3 for _ in range(2000))
    assert 900 < below < 1100


@pytest.mark.parametrize(
    "plain, said",
    [
        ("abc", "a list of choices"),
        (3, "a list of choices"),
        ([], "at least one choice"),
        ([1, 2, 1], "got the choices 1 and 1, which are equal"),
        ([1, True], "got the choices 1 and True, which are equal"),
        ([2, 1, 1.0], "got the choices 1 and 1.0, which are equal"),
        ([[0], [False]], "got the choices [0] and [False], which are equal"),
        (["[1]", [1]], "got the choices '[1]' and [1], which are equal"),
        ([float("nan")], "plain values"),
        ([object()], "plain values"),
        ({"low": 1}, "got None for high"),
        ({"low": 1, "high": "2"}, "got '2' for high"),
        ({"low": 3, "high": 2}, "low <= high"),
        ({"low": 1, "high": 2, "setp": 1}, "'setp'; allowed: low, high, step, log"),
        ({"low": 1, "high": 4, "step": 2}, "a part of high - low = 3"),
        ({"low": 1, "high": 4, "step": 0.5}, "an integer for integers"),
        ({"low": 1, "high": 4, "step": 0}, "above 0"),
        ({"low": 1, "high": 4, "step": 1, "log": True}, "one of them"),
        ({"low": 0.0, "high": 1.0, "log": True}, "above 0"),
        ({"low": 1, "high": 2, "log": 1}, "true, false"),
        ({"low": True, "high": 2}, "got True for low"),
    ],
    ids=lambda value: None,
)
def test_what_is_none_is_refused(plain, said):
    with pytest.raises(ValueError) as caught:
        read_dimension(plain)
    assert said in str(caught.value)


def test_ends():
    assert Range(1, 3).ends == (1, 3)
    assert Range(4, 64).ends == (4, 5, 64)  # a rule may refuse what is odd
    assert Range(4, 64, step=2).ends == (4, 64)
    assert Range(4, 10, step=3).ends == (4, 7, 10)
    assert Range(4, 5).ends == (4, 5) and Range(4, 4).ends == (4,)
    assert Range(4.0, 6.0, step=1.0).ends == (4.0, 6.0)
    assert Choices((1, None)).ends == (1, None)


@pytest.mark.parametrize("low, high, step", [(0.1, 0.7, 0.1), (0.2, 0.8, 0.3), (-0.7, -0.1, 0.1)])
def test_rounding_leaves_no_range(low, high, step):
    """As 0.1 + 6 * 0.1 does, which is more than 0.7: a study takes no such value back."""
    dimension = read_dimension({"low": low, "high": high, "step": step})
    source = random.Random(0)
    drawn = [dimension.draw(source) for _ in range(200)]
    for values in (dimension.points(), dimension.lattice(), drawn):
        assert min(values) == low and max(values) == high
    distribution = optuna.distributions.FloatDistribution(low, high, step=step)
    assert all(distribution._contains(value) for value in dimension.points())

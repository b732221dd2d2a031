"""Change points: against the definition written out, by their rate of false alarms, and by where they are."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stackwise.gate.history.change_point import ChangePoint, _best_split, change_points, latest_segment


def energy_statistics(values, min_size):
    """Of each split and end, as Matteson and James define it, pair by pair."""
    found = {}
    for split in range(min_size, len(values) - min_size + 1):
        for end in range(split + min_size, len(values) + 1):
            x, y = values[:split], values[split:end]
            n, m = len(x), len(y)
            across = sum(abs(a - b) for a in x for b in y) * 2 / (n * m)
            first = sum(abs(a - b) for a, b in itertools.combinations(x, 2)) / math.comb(n, 2)
            second = sum(abs(a - b) for a, b in itertools.combinations(y, 2)) / math.comb(m, 2)
            found[split, end] = n * m / (n + m) * (across - first - second)
    return found


@settings(max_examples=60)
@given(st.lists(st.floats(-100, 100), min_size=4, max_size=14), st.integers(2, 4))
def test_best_split_is_that_of_the_definition(values, min_size):
    found, split = _best_split(np.array(values), min_size)
    wanted = energy_statistics(values, min_size)
    if not wanted:
        assert split is None
        return
    best = max(wanted.values())
    assert found == pytest.approx(max(best, 0.0), abs=1e-9)
    if best > 1e-6:
        assert max(each for (place, _), each in wanted.items() if place == split) == pytest.approx(best)


def test_places_of_changes_are_found():
    random = np.random.default_rng(5)
    values = np.concatenate([random.normal(level, 1.0, 40) for level in (0, 4, 1)])
    found = change_points(values)
    assert len(found) == 2
    assert all(abs(change.index - place) <= 2 for change, place in zip(found, (40, 80), strict=True))
    assert all(change.p == 1 / 100 for change in found)


def test_a_change_that_comes_back_is_not_masked():
    # A split whose second part had to reach the end would see two nearly equal means.
    random = np.random.default_rng(8)
    values = np.concatenate([random.normal(level, 1.0, 25) for level in (0, 3, 0)])
    assert [round(change.index / 25) for change in change_points(values)] == [1, 2]


def test_a_change_of_spread_alone_is_found():
    random = np.random.default_rng(2)
    values = np.concatenate([random.normal(0, 0.1, 60), random.normal(0, 3, 60)])
    assert any(abs(change.index - 60) < 8 for change in change_points(values))


@pytest.mark.parametrize("draw", ["normal", "heavy tails", "skewed"])
def test_false_alarms_are_as_rare_as_promised(draw):
    random = np.random.default_rng(11)
    makers = {
        "normal": lambda: random.normal(size=30),
        "heavy tails": lambda: random.standard_t(2, 30),
        "skewed": lambda: random.lognormal(size=30),
    }
    alarms = sum(bool(change_points(makers[draw](), alpha=0.05, permutations=99)) for _ in range(200))
    # 10 of 200 are expected; more than 19 with a chance of 0.1 %.
    assert alarms <= 19


def test_a_shift_of_two_deviations_is_found_with_its_place():
    random = np.random.default_rng(12)
    found = [
        change_points(np.concatenate([random.normal(0, 1, 20), random.normal(2, 1, 20)])) for _ in range(50)
    ]
    near = [changes for changes in found if any(abs(change.index - 20) <= 3 for change in changes)]
    assert len(near) >= 45


@pytest.mark.parametrize(
    "values, places",
    [
        ([], []),
        ([1.0, 2.0], []),
        ([3.0] * 40, []),
        ([0.1] * 20 + [0.3] * 20, [20]),
        ([0.1] * 3 + [9.0] * 3, []),  # too short for two segments of four
    ],
    ids=["none", "two", "constant", "exact", "short"],
)
def test_small_and_exact_series(values, places):
    assert [change.index for change in change_points(values)] == places


def test_the_same_seed_gives_the_same():
    values = np.random.default_rng(3).normal(size=60)
    values[30:] += 0.9
    assert change_points(values, seed=4) == change_points(values, seed=4)


def test_latest_segment():
    assert latest_segment([0.0] * 12 + [1.0] * 12) == 12
    assert latest_segment([0.0] * 12) == 0


@pytest.mark.parametrize(
    "options, named",
    [
        ({"alpha": 0.0}, "alpha"),
        ({"min_size": 1}, "min_size"),
        ({"permutations": 50}, "permutations: got 50"),
    ],
    ids=["alpha", "min_size", "permutations"],
)
def test_what_cannot_be_is_refused(options, named):
    with pytest.raises(ValueError, match=named):
        change_points([0.0] * 20, **options)


def test_what_is_no_number_is_refused():
    with pytest.raises(ValueError, match="finite numbers"):
        change_points([0.0, math.nan])


def test_p_is_the_share_of_shuffled_series():
    # Of four and four different values, 2 of the 70 ways to choose the first four split as well as in order.
    values = [0.0, 0.1, 0.2, 0.3, 5.0, 5.1, 5.2, 5.3]
    [found] = change_points(values, alpha=0.05, permutations=1999)
    assert isinstance(found, ChangePoint) and found.index == 4
    assert found.p == pytest.approx(2 / 70, abs=0.012)

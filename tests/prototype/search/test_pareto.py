"""The front and its area, against counting and against Optuna."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.prototype.search import hypervolume, non_dominated

small = st.integers(0, 5).map(float)
pairs = st.lists(st.tuples(small, small), max_size=12)
triples = st.lists(st.tuples(small, small, small), max_size=12)


@given(pairs | triples)
def test_front_is_what_brute_force_finds(points):
    def beaten(point):
        return any(
            all(a <= b for a, b in zip(other, point, strict=True))
            and any(a < b for a, b in zip(other, point, strict=True))
            for other in points
        )

    assert non_dominated(points) == [i for i, point in enumerate(points) if not beaten(point)]


@given(pairs)
def test_area_is_the_number_of_unit_squares(points):
    # With whole coordinates and a reference of (5, 5), each square belongs to the points below and left.
    squares = sum(
        any(x <= column and y <= row for x, y in points)
        for column, row in itertools.product(range(5), repeat=2)
    )
    assert hypervolume(points, (5.0, 5.0)) == squares


def test_area_is_that_of_optuna():
    from optuna._hypervolume import compute_hypervolume

    np = pytest.importorskip("numpy")
    source = random.Random(0)
    for _ in range(20):
        points = [(source.uniform(0, 2), source.uniform(-1e5, 0)) for _ in range(15)]
        inside = [point for point in points if point[0] < 1.5 and point[1] < -1e4]
        expected = compute_hypervolume(np.array(inside), np.array([1.5, -1e4]))
        assert hypervolume(points, (1.5, -1e4)) == pytest.approx(expected)


def test_by_hand():
    points = [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0), (3.0, 3.0), (1.0, 3.0)]
    assert non_dominated(points) == [0, 1, 2, 4]
    assert hypervolume(points, (4.0, 4.0)) == 6.0
    assert hypervolume([], (4.0, 4.0)) == 0.0


def test_wrong_points_are_refused():
    with pytest.raises(ValueError, match=r"points\[1\]: got 1; allowed: 2 coordinates"):
        non_dominated([(1.0, 2.0), (1.0,)])
    with pytest.raises(ValueError, match=r"points\[0\].*without NaN"):
        non_dominated([(float("nan"), 2.0)])
    with pytest.raises(ValueError, match="two coordinates"):
        hypervolume([(1.0, 2.0, 3.0)], (1.0, 2.0, 3.0))

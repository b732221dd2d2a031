"""pass@k against its definition."""

import itertools
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import binomtest

from stackwise.quality.pass_at_k import estimate_pass_at_k, pass_at_k


def by_counting(n, c, k):
    """Over all ways to draw."""
    draws = list(itertools.combinations(range(n), k))
    return Fraction(sum(any(i < c for i in draw) for draw in draws), len(draws))


def by_product(n, c, k):
    """1 - the chance that every one of the draws, one after the other, is wrong."""
    wrong = Fraction(1)
    for drawn in range(k):
        wrong *= Fraction(max(0, n - c - drawn), n - drawn)
    return 1 - wrong


@pytest.mark.parametrize("n", range(1, 9))
def test_is_the_share_of_all_draws(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            assert pass_at_k(n, c, k) == pytest.approx(float(by_counting(n, c, k)), abs=1e-15)


def test_is_the_closed_form_for_all_to_twenty():
    for n in range(1, 21):
        for c in range(n + 1):
            for k in range(1, n + 1):
                assert pass_at_k(n, c, k) == pytest.approx(float(by_product(n, c, k)), abs=1e-15)


def test_many_programs():
    assert pass_at_k(1000, 1, 100) == pytest.approx(0.1, abs=1e-12)
    assert pass_at_k(200, 200, 100) == 1.0
    assert pass_at_k(200, 0, 100) == 0.0


def test_is_unbiased_where_the_simple_formula_is_not():
    n, k, p = 10, 5, 0.2
    rng = np.random.default_rng(0)
    right = rng.binomial(n, p, size=100_000)
    truth = 1 - (1 - p) ** k
    by_c = np.array([pass_at_k(n, c, k) for c in range(n + 1)])
    simple = np.array([1 - (1 - c / n) ** k for c in range(n + 1)])
    assert by_c[right].mean() == pytest.approx(truth, abs=3e-3)
    assert simple[right].mean() < truth - 0.02


@pytest.mark.parametrize(
    ("n", "c", "k", "message"),
    [
        (1, 0, 2, "k: got 2; allowed: at most n=1"),
        (3, 4, 1, "c: got 4; allowed: at most n=3"),
        (0, 0, 1, "n: got 0"),
        (3, -1, 1, "c: got -1"),
        (3, 1, 0, "k: got 0"),
    ],
)
def test_refused(n, c, k, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(n, c, k)


def test_of_problems():
    results = {"a": [True, False, False], "b": [False] * 4, "c": [True, True]}
    found = estimate_pass_at_k(results, 2)
    assert found.estimate == pytest.approx((2 / 3 + 0 + 1) / 3)
    assert (found.k, found.n_problems, found.level) == (2, 3, 0.95)
    assert 0.0 <= found.low < found.estimate < found.high <= 1.0
    assert found == estimate_pass_at_k(list(results.values()), 2)
    assert str(found).startswith("pass@2 55.6% [")


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(("right", "n"), [(3, 10), (50, 164), (1, 40)])
def test_with_one_program_it_is_that_of_agresti_and_coull(right, n, level):
    """Which has the middle of Wilson's interval, and holds all of it."""
    found = estimate_pass_at_k([[i < right] for i in range(n)], 1, level=level)
    wilson = binomtest(right, n).proportion_ci(level, method="wilson")
    assert found.low <= wilson.low < wilson.high <= found.high
    if found.low > 0:
        assert found.low + found.high == pytest.approx(wilson.low + wilson.high)
    assert found.high - found.low < 1.3 * (wilson.high - wilson.low)


@pytest.mark.parametrize("right", [True, False])
def test_where_all_came_out_alike_others_may_not(right):
    widths = []
    for n in (2, 5, 20, 164):
        found = estimate_pass_at_k([[right] * 3] * n, 2)
        assert found.estimate == right and found.low <= found.estimate <= found.high
        widths.append(found.high - found.low)
    assert widths == sorted(widths, reverse=True) and widths[0] > 0.6 and 0.01 < widths[-1] < 0.05


@pytest.mark.parametrize("programs", [1, 5])
@pytest.mark.parametrize(("n", "p"), [(5, 0.9), (10, 0.9), (20, 0.95), (20, 0.1), (40, 0.5)])
def test_it_covers_what_it_says(n, p, programs):
    rng, runs, held = np.random.default_rng(0), 600, 0
    for _ in range(runs):
        # Of several programs, problems are of their own difficulty: few are solved now and then.
        each = np.full(n, p) if programs == 1 else rng.beta(0.4, 0.4 * (1 - p) / p, size=n)
        found = estimate_pass_at_k(rng.random((n, programs)) < each[:, None], 1)
        held += found.low <= p <= found.high
    assert 0.9 <= held / runs <= 0.995


def test_it_is_of_problems_and_not_of_programs():
    """Of many programs for few problems the interval is that of few problems: of 40 halves, normal theory."""
    results = [[True] * 100] * 20 + [[False] * 100] * 20
    found = estimate_pass_at_k(results, 1)
    half = 1.96 * 0.5 / 40**0.5
    assert found.low == pytest.approx(0.5 - half, abs=0.02)
    assert found.high == pytest.approx(0.5 + half, abs=0.02)


def test_a_single_problem_says_nothing_of_others():
    found = estimate_pass_at_k([[True, False, False, True]], 1)
    assert (found.estimate, found.low, found.high) == (0.5, 0.0, 1.0)


def test_many_problems():
    results = [[i % 2 == 0] for i in range(3000)]
    tracemalloc.start()
    try:
        found = estimate_pass_at_k(results, 1)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 64e6
    half = 1.96 * 0.5 / 3000**0.5
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=2e-3)


@pytest.mark.parametrize(
    ("results", "k", "message"),
    [
        ({}, 1, "results: got {}"),
        ({"HumanEval/0": [True] * 3, "HumanEval/1": [True]}, 2, "got 1 programs for problem 'HumanEval/1'"),
        ([[True]], 0, "k: got 0"),
    ],
)
def test_what_is_too_little(results, k, message):
    with pytest.raises(ValueError, match=message):
        estimate_pass_at_k(results, k)

"""Paired differences against published figures, other formulas and simulation."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, ttest_rel

from stackwise.quality.paired import difference_of_means, difference_of_shares


def outcomes(both, wins, losses, neither):
    first = [True] * (both + wins) + [False] * (losses + neither)
    second = [True] * both + [False] * wins + [True] * losses + [False] * neither
    return first, second


# Tango 1998, the example of a crossover trial on 44 patients, of whom one parted.
PUBLISHED = [
    ((43, 0, 1, 0), (-0.1180, 0.0600)),
]


@pytest.mark.parametrize(("table", "interval"), PUBLISHED)
def test_published(table, interval):
    found = difference_of_shares(*outcomes(*table))
    assert (found.low, found.high) == pytest.approx(interval, abs=2e-3)


def by_grid(n, wins, losses, z=1.959963984540054):
    """The interval by looking at every difference, with the likelihood maximised on a grid."""
    deltas = np.linspace(-0.999, 0.999, 1999)
    kept = []
    for delta in deltas:
        lost = np.linspace(max(0.0, -delta), (1 - delta) / 2, 4001)[1:-1]
        won = lost + delta
        rest = 1 - won - lost
        with np.errstate(divide="ignore", invalid="ignore"):
            parts = [
                k * np.log(p) if k else 0 * p
                for k, p in ((wins, won), (losses, lost), (n - wins - losses, rest))
            ]
        q = lost[np.argmax(np.nan_to_num(sum(parts), nan=-np.inf))]
        error = np.sqrt(n * (2 * q + delta * (1 - delta)))
        if abs(wins - losses - n * delta) <= z * error:
            kept.append(delta)
    return min(kept), max(kept)


@pytest.mark.parametrize(
    ("n", "wins", "losses"), [(30, 6, 2), (30, 0, 0), (50, 0, 5), (200, 30, 30), (12, 12, 0)]
)
def test_is_where_the_score_test_does_not_refuse(n, wins, losses):
    found = difference_of_shares(*outcomes(0, wins, losses, n - wins - losses))
    assert (found.low, found.high) == pytest.approx(by_grid(n, wins, losses), abs=3e-3)


@given(st.tuples(*[st.integers(0, 40)] * 4).filter(any))
def test_properties(table):
    first, second = outcomes(*table)
    found, turned = difference_of_shares(first, second), difference_of_shares(second, first)
    assert -1 <= found.low <= found.difference <= found.high <= 1
    assert found.difference == np.mean(first) - np.mean(second) or found.difference == pytest.approx(
        np.mean(first) - np.mean(second)
    )
    assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low), abs=1e-9)
    assert (turned.wins, turned.losses) == (found.losses, found.wins)
    wider = difference_of_shares(first, second, level=0.99)
    assert wider.low <= found.low and found.high <= wider.high
    parted = found.wins + found.losses
    assert found.p_value == pytest.approx(binomtest(found.wins, parted).pvalue if parted else 1.0)


def test_it_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    n, p_wins, p_losses = 60, 0.12, 0.05
    covered = 0
    draws = rng.multinomial(n, [p_wins, p_losses, 1 - p_wins - p_losses], size=600)
    for wins, losses, rest in draws:
        found = difference_of_shares(*outcomes(0, wins, losses, rest))
        covered += found.low <= p_wins - p_losses <= found.high
    assert 0.93 <= covered / len(draws) <= 0.975


def test_what_both_get_right_narrows_it():
    parted = difference_of_shares(*outcomes(0, 30, 30, 40))
    alike = difference_of_shares(*outcomes(60, 3, 3, 34))
    assert alike.high - alike.low < 0.5 * (parted.high - parted.low)


@pytest.mark.parametrize(
    ("table", "within", "standing"),
    [
        ((50, 0, 0, 50), 0.05, "not worse"),
        ((50, 0, 40, 50), 0.05, "worse"),
        ((5, 1, 2, 5), 0.01, "open"),
        ((50, 40, 0, 50), 0.0, "not worse"),
    ],
)
def test_standing(table, within, standing):
    assert difference_of_shares(*outcomes(*table)).standing(within) == standing


def test_means_are_students_t():
    rng = np.random.default_rng(1)
    common = rng.normal(size=30)  # what is hard for one is hard for the other
    first, second = common + 0.1 + 0.1 * rng.normal(size=30), common
    found = difference_of_means(first, second, level=0.9)
    wanted = ttest_rel(first, second).confidence_interval(0.9)
    assert found.difference == pytest.approx(np.mean(first - second))
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))
    assert found.wins + found.losses == 30
    assert found == difference_of_means(list(first), list(second), level=0.9)


def test_weighted_means():
    found = difference_of_means([1.0, 0.0], [0.0, 0.0], [1, 3])
    assert found.difference == 0.25
    # Errors 1 * 0.75 and 3 * -0.25; the 97.5% quantile of one degree of freedom, a Cauchy distribution.
    reach = math.tan(math.pi * 0.475) * math.sqrt(2 * (0.75**2 + 0.75**2)) / 4
    assert (found.low, found.high) == pytest.approx((0.25 - reach, 0.25 + reach))


@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "weighted"])
@pytest.mark.parametrize("n", [3, 5, 10, 40])
def test_intervals_of_means_cover_what_they_say(n, weighted):
    rng, runs, held = np.random.default_rng(n), 1500, 0
    for _ in range(runs):
        parts = 0.3 + rng.normal(size=n)
        weights = rng.uniform(1, 3, size=n) if weighted else None
        found = difference_of_means(parts, np.zeros(n), weights)
        held += found.low <= 0.3 <= found.high
    # With equal weights it is exact; the standard error of the share is 0.006.
    assert held / runs == pytest.approx(0.95, abs=0.03 if weighted else 0.02)


def test_of_one_example_nothing_is_known_of_others():
    found = difference_of_means([1.0], [0.5])
    assert (found.difference, found.low, found.high) == (0.5, -math.inf, math.inf)
    assert found.standing(10.0) == found.standing(10.0, less_is_better=True) == "open"
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (told["difference"], told["low"], told["high"]) == (0.5, "-inf", "inf")


def test_of_costs_the_lower_one_wins():
    found = difference_of_means([1.0, 1.0, 3.0, 1.0], [2.0, 2.0, 2.0, 1.0], less_is_better=True)
    assert (found.wins, found.losses) == (2, 1)
    assert difference_of_means([1.0, 3.0], [2.0, 0.0]).wins == 1


def test_infinite_surprise_tells_nothing():
    found = difference_of_means([math.inf, 1.0], [math.inf, 2.0])
    assert math.isnan(found.difference) and found.standing(0.1) == "open"
    assert found.to_dict()["low"] == "nan"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: difference_of_shares([], []), "examples: got 0"),
        (lambda: difference_of_shares([True], [True, False]), "examples of the second: got 2"),
        (lambda: difference_of_shares([True], [True], level=1.0), "level: got 1.0"),
        (lambda: difference_of_means([1.0], [1.0], [0.0]), "weights: got 0.0"),
        (lambda: difference_of_means([1.0], [1.0], [1.0, 2.0]), "weights: got 2"),
        (lambda: difference_of_shares([True], [True]).standing(-1), "within: got -1"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()

"""Paired differences against published figures, other formulas and simulation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

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


def test_means():
    rng = np.random.default_rng(1)
    common = rng.normal(size=400)  # what is hard for one is hard for the other
    first, second = common + 0.1 + 0.1 * rng.normal(size=400), common
    found = difference_of_means(first, second)
    error = np.std(first - second, ddof=1) / 20
    assert found.difference == pytest.approx(np.mean(first - second))
    assert (found.low, found.high) == pytest.approx(
        (found.difference - 1.96 * error, found.difference + 1.96 * error), abs=0.15 * error
    )
    assert found.wins + found.losses == 400
    assert found == difference_of_means(list(first), list(second))


def test_weighted_means():
    found = difference_of_means([1.0, 0.0], [0.0, 0.0], [1, 3])
    assert found.difference == 0.25
    assert (found.low, found.high) == (0.0, 1.0)


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

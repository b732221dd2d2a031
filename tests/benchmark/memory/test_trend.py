"""The trend of a series: its slope and interval by definition, and what counts as going on."""

import itertools
import random
import statistics

import pytest

from stackwise.benchmark.memory.trend import LEAST_STEPS, trend


def slopes_of(values):
    """All slopes between pairs, in order, one by one."""
    pairs = itertools.combinations(enumerate(values), 2)
    return sorted((later - earlier) / (j - i) for (i, earlier), (j, later) in pairs)


def noisy(slope, noise, n=40, seed=0):
    random_numbers = random.Random(seed)
    return [slope * i + random_numbers.gauss(0.0, noise) for i in range(n)]


@pytest.mark.parametrize("n", [8, 9, 40, 101])
@pytest.mark.parametrize("slope", [0.0, 0.3, -2.0])
def test_slope_is_the_median_of_all_slopes(n, slope):
    values = noisy(slope, 1.0, n)
    slopes = slopes_of(values)
    found = trend(values)
    assert found.per_step == pytest.approx(statistics.median(slopes), rel=1e-12)
    assert found.low <= found.per_step <= found.high
    assert min(abs(found.low - each) for each in slopes) < 1e-12
    assert min(abs(found.high - each) for each in slopes) < 1e-12


def test_interval_by_hand():
    # n = 10: 45 slopes; the variance of Kendall's S is 10 * 9 * 25 / 18 = 125, so that 99 % are within
    # 2.5758 * 11.180 = 28.80 of it: from the slope at place (45 - 28.8) / 2 = 8.1, cut off, to that at 36.9,
    # rounded up.
    values = [0.0, 3.0, 1.0, 8.0, 2.0, 9.0, 9.5, 4.0, 12.0, 7.0]
    slopes = slopes_of(values)
    found = trend(values)
    assert (found.low, found.high) == (slopes[8], slopes[37])


def test_interval_holds_the_truth():
    missed = sum(
        not found.low <= 0.5 <= found.high
        for found in (trend(noisy(0.5, 3.0, seed=seed)) for seed in range(400))
    )
    assert missed <= 12  # 4 are expected; more than 12 would come about once in 2000 such samples


def test_a_straight_line():
    found = trend([5.0 + 2.0 * i for i in range(16)])
    assert (found.per_step, found.low, found.high) == (2.0, 2.0, 2.0)
    assert found.floors == (5.0, 13.0, 21.0, 29.0)
    assert found.goes_on
    assert found.exceeds(1.9)
    assert not found.exceeds(2.0)


def test_wild_values_do_not_move_it():
    values = [0.0] * 40
    values[7] = values[20] = values[39] = 1e9
    found = trend(values)
    assert (found.per_step, found.low, found.high) == (0.0, 0.0, 0.0)
    assert not found.goes_on
    risen = [10.0 * i for i in range(40)]
    for place in (3, 12, 25):
        risen[place] += 1e9
    assert trend(risen).per_step == pytest.approx(10.0)
    assert trend(risen).exceeds(9.0)


def test_a_leak_of_every_fifth_step_goes_on():
    found = trend([i // 5 for i in range(40)])
    assert found.per_step == pytest.approx(0.2, rel=0.1)
    assert found.exceeds(0)


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_under_noise(seed):
    assert trend(noisy(1.0, 1.0, seed=seed)).exceeds(0.5)


@pytest.mark.parametrize("filled", [1, 5, 10, 15, 20])
def test_what_fills_up_in_the_first_half_does_not_go_on(filled):
    assert not trend([min(i, filled) for i in range(40)]).goes_on


@pytest.mark.parametrize("period", [2, 3, 5, 8, 10, 13, 16, 20])
@pytest.mark.parametrize("start", [0, 1, 7])
def test_what_is_emptied_again_does_not_go_on(period, start):
    assert not trend([(i + start) % period for i in range(40)]).goes_on


@pytest.mark.parametrize("place", [1, 9, 19, 30, 39])
def test_one_jump_does_not_go_on(place):
    assert not trend([1e6 * (i >= place) for i in range(40)]).goes_on


def test_what_slows_down_does_not_go_on():
    assert not trend([1000 * (1 - 0.8**i) for i in range(40)]).goes_on


def test_what_rises_ever_more_slowly_fades():
    assert trend([1000 * (1 - 0.98**i) for i in range(40)]).fades
    assert not trend([3.0 * i for i in range(40)]).fades
    assert not trend([float(i * i) for i in range(40)]).fades


def test_what_falls_does_not_go_on():
    assert not trend([-float(i) for i in range(40)]).goes_on


def test_noise_alone_exceeds_nothing():
    assert sum(trend(noisy(0.0, 5.0, seed=seed)).exceeds(0.0) for seed in range(500)) == 0


def test_too_few_values():
    with pytest.raises(ValueError, match=r"values: got 7; allowed: 8 or more of them"):
        trend([1.0] * (LEAST_STEPS - 1))


def test_plain_values():
    assert trend([float(i) for i in range(8)]).to_dict() == {
        "per_step": 1.0,
        "low": 1.0,
        "high": 1.0,
        "floors": [0.0, 2.0, 4.0, 6.0],
        "least": 1.0,
        "goes_on": True,
    }

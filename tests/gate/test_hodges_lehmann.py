import itertools
import math

import numpy as np
import pytest
from scipy import stats

from stackwise.gate.hodges_lehmann import hodges_lehmann


def test_the_estimate_is_the_median_of_the_means_of_pairs():
    values = [0.3, -1.2, 4.0, 0.9, 0.1]
    means = [(a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2)]
    assert hodges_lehmann(values).estimate == pytest.approx(np.median(means))


def test_one_wild_round_hardly_moves_it():
    values = [0.001 * n for n in range(-4, 5)]
    assert abs(hodges_lehmann([*values, 50.0]).estimate) < 0.002


def wilcoxon_interval(values, level):
    """All centres that Wilcoxon's test does not reject, from scipy's exact p values on either side of each
    mean of a pair, where alone they change."""
    means = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))
    gaps = [means[0] - 1, *((a + b) / 2 for a, b in itertools.pairwise(means)), means[-1] + 1]
    kept = [
        place
        for place, centre in enumerate(gaps)
        if stats.wilcoxon(np.array(values) - centre, method="exact").pvalue > 1 - level
    ]
    return means[kept[0] - 1], means[kept[-1]]


@pytest.mark.parametrize("count", [6, 8, 13, 20])
@pytest.mark.parametrize("level", [0.95, 0.9])
def test_the_interval_is_what_wilcoxons_test_does_not_reject(count, level):
    values = list(np.random.default_rng(count).standard_normal(count))
    found = hodges_lehmann(values, level)
    assert (found.low, found.high) == pytest.approx(wilcoxon_interval(values, level))
    assert level <= found.level < 1


def test_there_is_no_interval_of_too_few():
    found = hodges_lehmann([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.estimate, found.low, found.high, found.level) == (3.0, -math.inf, math.inf, 1.0)
    # Six of one sign have a chance of 1 in 64, two-sided 1 in 32.
    six = hodges_lehmann([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert (six.low, six.high, six.level) == (1.0, 6.0, 1 - 1 / 32)


def test_many_differences_take_the_normal_approximation():
    values = np.random.default_rng(3).standard_normal(201)
    exact, approximate = hodges_lehmann(values[:200]), hodges_lehmann(values)
    assert approximate.low == pytest.approx(exact.low, abs=0.03)
    assert approximate.high == pytest.approx(exact.high, abs=0.03)


@pytest.mark.parametrize("name", ["norm", "laplace", "t"])
def test_the_interval_holds_for_every_symmetric_distribution(name):
    draw = {"norm": stats.norm, "laplace": stats.laplace, "t": stats.t(2)}[name]
    samples = draw.rvs(size=(1500, 9), random_state=11)
    found = [hodges_lehmann(row) for row in samples]
    held = np.mean([each.low <= 0 <= each.high for each in found])
    # Binomial of 1500: 0.6 %.
    assert held == pytest.approx(found[0].level, abs=0.02)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]], ids=repr)
def test_what_is_no_difference_is_refused(values):
    with pytest.raises(ValueError, match="differences: got"):
        hodges_lehmann(values)


def test_a_level_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="level: got 95"):
        hodges_lehmann([1.0], 95)

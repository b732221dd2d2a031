"""Spearman's rho, against SciPy's."""

import numpy as np
import pytest

from bench.prototype.rank_correlation import average_ranks, rank_correlation, spearman, stepped_up


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("values", [4, 1000], ids=["ties", "no ties"])
def test_it_is_the_rho_of_scipy(seed, values):
    stats = pytest.importorskip("scipy.stats")
    x, y = np.random.default_rng(seed).integers(values, size=(2, 14)).astype(float)
    assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    assert average_ranks(x).tolist() == stats.rankdata(x).tolist()


def test_what_tells_no_order_has_none():
    assert spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) == 0.0


def test_infinite_losses_are_the_last():
    assert spearman([1.0, 2.0, float("inf")], [3.0, 4.0, 5.0]) == 1.0


def test_nan_and_other_lengths_are_refused():
    with pytest.raises(ValueError, match="NaN"):
        spearman([1.0, float("nan")], [1.0, 2.0])
    with pytest.raises(ValueError, match="allowed: 2, as many as x"):
        spearman([1.0, 2.0], [1.0])


def test_interval():
    order = [(float(i), float(i)) for i in range(12)]
    assert rank_correlation(order, resamples=200).to_dict() == {"rho": 1.0, "low": 1.0, "high": 1.0, "n": 12}
    rng = np.random.default_rng(0)
    noisy = [(float(i), i + rng.normal(0, 4)) for i in range(12)]
    found = rank_correlation(noisy, resamples=500)
    assert found.low < found.rho < found.high
    assert found == rank_correlation(noisy, resamples=500)
    wider = rank_correlation(noisy[:5], resamples=500)
    assert wider.high - wider.low > found.high - found.low


def test_two_are_too_few():
    assert str(rank_correlation([(1.0, 1.0), (2.0, 2.0)])) == "- of 2"


def test_the_mean_of_two_is_as_reliable_as_it_is_found_to_be():
    """The means of two pairs of measurements correlate as the formula says of single ones."""
    source = np.random.default_rng(0)
    things = source.normal(size=100_000)
    one, two, three, four = (things + source.normal(size=things.size) for _ in range(4))
    single = np.corrcoef(one, two)[0, 1]
    of_means = np.corrcoef(one + two, three + four)[0, 1]
    assert stepped_up(single) == pytest.approx(of_means, abs=0.01)
    assert (stepped_up(0.0), stepped_up(1.0)) == (0.0, 1.0)
    assert stepped_up(None) is None and stepped_up(-0.2) is None

import numpy as np
import pytest
from scipy import stats

from stackwise.gate.boundary import check_looks, crossing, quantiles
from stackwise.gate.sequential import Rule

LOOKS = Rule().looks


def simulated_crossing(looks, bounds, trials, seed):
    """How often the t statistic of any look is beyond its bound, of normal samples."""
    samples = np.random.default_rng(seed).standard_normal((trials, looks[-1]))
    beyond = np.zeros(trials, dtype=bool)
    for look, bound in zip(looks, bounds, strict=True):
        seen = samples[:, :look]
        beyond |= seen.mean(1) / (seen.std(1, ddof=1) / np.sqrt(look)) > bound
    return beyond.mean()


@pytest.mark.parametrize("looks", [LOOKS, (2, 3, 4), (4, 5, 7, 8), (3, 12)], ids=str)
@pytest.mark.parametrize("shape", [0.0, 0.4, 0.5])
def test_all_looks_together_cross_with_the_chance(looks, shape):
    bounds = quantiles(looks, 0.02, shape)
    assert crossing(looks, bounds) == pytest.approx(0.02, rel=5e-3)
    # 200,000 samples: the count varies by 1.6 %.
    assert simulated_crossing(looks, bounds, 200_000, seed=5) == pytest.approx(0.02, rel=0.06)


def test_one_look_is_students_t():
    assert quantiles((9,), 0.01, 0.5) == pytest.approx((stats.t.isf(0.01, 8),))
    assert crossing((9,), (2.5,)) == pytest.approx(stats.t.sf(2.5, 8))


@pytest.mark.parametrize(
    ("shape", "published"),
    [(0.5, [2.413] * 5), (0.0, [2.040 * (5 / k) ** 0.5 for k in range(1, 6)])],
    ids=["Pocock", "O'Brien-Fleming"],
)
def test_boundaries_of_many_rounds_are_the_published_ones(shape, published):
    # Jennison & Turnbull, Group Sequential Methods, 2000, tables 2.1 and 2.3: two-sided 0.05, five looks.
    looks = (400, 800, 1200, 1600, 2000)
    bounds = quantiles(looks, 0.025, shape)
    normal = [stats.norm.isf(stats.t.sf(t, look - 1)) for t, look in zip(bounds, looks, strict=True)]
    assert normal == pytest.approx(published, rel=5e-3)


@pytest.mark.parametrize(("looks", "shape"), [((4, 1000), 0.0), ((4, 1000), 1.0), ((2, 300), 0.0)], ids=str)
def test_a_look_that_gets_next_to_nothing(looks, shape):
    bounds = quantiles(looks, 0.01, shape)
    lonely = looks[1] if shape == 0 else looks[0]
    assert bounds[looks.index(lonely)] == pytest.approx(stats.t.isf(0.01, lonely - 1), rel=1e-3)


def test_correction_is_less_than_bonferronis():
    exact = quantiles(LOOKS, 0.01, 0.5)
    for look, bound in zip(LOOKS, exact, strict=True):
        assert stats.t.isf(0.01, look - 1) < bound < stats.t.isf(0.01 / len(LOOKS), look - 1)


@pytest.mark.parametrize("looks", [(), (1, 4), (4, 4), (6, 4), (4, 6.0), (True, 4)], ids=str)
def test_looks_are_numbers_of_rounds_that_rise(looks):
    with pytest.raises(ValueError, match="looks: got"):
        check_looks(looks)


@pytest.mark.parametrize(
    ("chance", "shape", "key"), [(0.0, 0.5, "chance"), (0.5, 0.5, "chance"), (0.01, -0.1, "shape")]
)
def test_a_chance_that_makes_no_sense_is_refused(chance, shape, key):
    with pytest.raises(ValueError, match=f"{key}: got"):
        quantiles(LOOKS, chance, shape)

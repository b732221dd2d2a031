"""What a sweep says: losses that are made up, so that sensitivity, best learning rate and drift are known."""

import json
import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.prototype.sensitivity import LEARNING_RATES
from stackwise.prototype.sweep_result import LearningRateSweep, learning_rate_sensitivity
from stackwise.prototype.sweep_run import SweepRun

INITIAL = 5.5
LOSSES = st.lists(st.one_of(st.floats(0, 20), st.just(math.inf)), min_size=1, max_size=9)


def run(width, rate, seed, loss, initial=INITIAL, status="success"):
    return SweepRun(width, rate, seed, loss, initial, status, None, 1.0)


def sweep(loss_of, widths=(1, 2, 4, 8), rates=LEARNING_RATES, seeds=(0, 1, 2)):
    runs = [run(w, rate, seed, loss_of(w, rate, seed)) for w in widths for rate in rates for seed in seeds]
    return LearningRateSweep("planted", "own", 10, tuple(runs))


def bowl(best_of, depth=0.1):
    """Losses that are parabolas over the logarithm of the learning rate, with the minimum 2 where told."""
    return lambda width, rate, seed: 2 + depth * math.log(rate / best_of(width, seed)) ** 2


@given(LOSSES, st.floats(1, 10))
def test_sensitivity_is_mean_excess_of_losses_clipped_at_initial_loss(losses, initial):
    cut = np.minimum(losses, initial)
    expected = np.mean(cut) - np.min(cut)
    assert learning_rate_sensitivity(losses, initial) == pytest.approx(expected, abs=1e-12)


def test_sensitivity_by_hand():
    # Excess over the best, 2: 1, 0, 0.5, and 3 of a run that is worse than no training, or is no number.
    assert learning_rate_sensitivity([3.0, 2.0, 2.5, 9.0], 5.0) == pytest.approx(4.5 / 4)
    assert learning_rate_sensitivity([3.0, 2.0, 2.5, math.nan], 5.0) == pytest.approx(4.5 / 4)
    assert learning_rate_sensitivity([3.0, 2.0, 2.5, math.inf], 5.0) == pytest.approx(4.5 / 4)
    assert learning_rate_sensitivity([2.0, 2.0, 2.0], 5.0) == 0


def test_a_model_that_learns_nowhere_is_not_sensitive():
    assert learning_rate_sensitivity([math.inf, 7.0, 5.5], 5.5) == 0


@pytest.mark.parametrize(
    ("losses", "initial", "message"),
    [([], 5.0, "losses: got 0"), ([1.0], math.nan, "initial_loss: got nan")],
    ids=["no losses", "initial"],
)
def test_what_has_no_sensitivity_is_refused(losses, initial, message):
    with pytest.raises(ValueError, match=message):
        learning_rate_sensitivity(losses, initial)


def test_the_default_grid_is_the_papers():
    assert (LEARNING_RATES[0], LEARNING_RATES[-1], len(LEARNING_RATES)) == (3e-4, 3e-1, 7)
    ratios = np.diff(np.log10(LEARNING_RATES))
    assert np.allclose(ratios, 0.5, atol=0.03)  # two to a decade, rounded


def test_sensitivity_of_a_width_is_the_mean_of_its_seeds():
    # Seed s has excess s at one of four learning rates, so s / 4.
    made = sweep(lambda width, rate, seed: 2 + seed * (rate == 0.1), (1,), (1e-3, 1e-2, 1e-1, 1.0))
    estimate = made.sensitivity(1)
    assert estimate.value == pytest.approx(0.25)
    assert estimate.high - estimate.value == pytest.approx(4.3027 * 0.25 / math.sqrt(3), abs=1e-4)


@given(st.floats(math.log(1.1e-3), math.log(0.9e-1)), st.floats(0.01, 0.1))
def test_the_refined_best_learning_rate_is_where_a_parabola_is_lowest(log_best, depth):
    made = sweep(bowl(lambda width, seed: math.exp(log_best), depth), (1,), seeds=(0,))
    best = made.best(1)
    assert best.refined == pytest.approx(math.exp(log_best), rel=1e-6)
    nearest = min(LEARNING_RATES, key=lambda rate: abs(math.log(rate) - log_best))
    assert best.learning_rate == nearest
    assert not best.at_edge


@given(st.lists(st.floats(0, 5), min_size=3, max_size=7))
def test_the_refined_best_is_that_of_a_fit_through_the_neighbours(losses):
    rates = LEARNING_RATES[: len(losses)]
    best = sweep(lambda w, rate, s: losses[rates.index(rate)], (1,), rates, (0,)).best(1)
    place = losses.index(min(losses))
    assert best.learning_rate == rates[place]
    if best.at_edge:
        assert place in (0, len(losses) - 1)
        assert best.refined == best.learning_rate
    else:
        near, around = np.log(rates[place - 1 : place + 2]), losses[place - 1 : place + 2]
        assert rates[place - 1] < best.refined < rates[place + 1]
        if max(around) - min(around) > 1e-3:
            a, b, _ = np.polyfit(near - near[1], around, 2)
            assert math.log(best.refined) == pytest.approx(near[1] - b / (2 * a), abs=1e-6)


def test_best_learning_rate_at_grid_edge_is_marked_and_shows_no_transfer():
    made = sweep(bowl(lambda width, seed: 1e-4))
    assert all(made.best(width).at_edge for width in made.widths)
    assert made.drift().grid_steps == 0
    assert made.drift().at_edge == (1, 2, 4, 8)
    assert not made.transfers()
    assert "*" in str(made)


@pytest.mark.parametrize("slope", [-1.0, -0.5, 0.0, 0.25])
def test_drift_finds_a_planted_slope(slope):
    made = sweep(bowl(lambda width, seed: 0.02 * width**slope, depth=0.05))
    drift = made.drift()
    assert drift.slope.value == pytest.approx(slope, abs=1e-6)
    assert drift.slope.low == pytest.approx(slope, abs=1e-6)
    planted = {width: slope * math.log2(width) for width in (1, 2, 4, 8)}
    assert drift.log2_best == pytest.approx(planted, abs=1e-6)


def test_the_interval_of_the_slope_is_over_seeds():
    slopes = (-1.2, -1.0, -0.6)
    made = sweep(bowl(lambda width, seed: 0.02 * width ** slopes[seed], depth=0.05))
    reach = 4.302653 * np.std(slopes, ddof=1) / math.sqrt(3)
    slope = made.drift().slope
    assert (slope.value, slope.high - slope.value) == pytest.approx((np.mean(slopes), reach), abs=1e-4)


def test_a_learning_rate_transfers_within_so_many_steps_of_the_grid():
    rates = [0.01 * 2.0**i for i in range(-4, 5)]
    still = sweep(bowl(lambda width, seed: 0.01), rates=rates)
    by_one = sweep(bowl(lambda width, seed: 0.01 if width < 8 else 0.02), rates=rates)
    by_two = sweep(bowl(lambda width, seed: {1: 0.02, 8: 0.005}.get(width, 0.01)), rates=rates)
    assert [made.drift().grid_steps for made in (still, by_one, by_two)] == [0, 1, 2]
    assert [made.transfers() for made in (still, by_one, by_two)] == [True, True, False]
    assert still.transfers(within=0)
    assert not by_one.transfers(within=0)
    assert by_two.transfers(within=2)


def test_one_width_has_no_drift():
    drift = sweep(bowl(lambda width, seed: 0.01), widths=(1,)).drift()
    assert drift.slope is None
    assert str(drift) == "one width: no drift"


def test_a_reduction_is_paired_by_seed():
    # Seeds differ by far more than what is done to them, which is 0.3 nat at one of seven learning rates.
    plain = sweep(lambda width, rate, seed: 2 + (0.3 + seed) * (rate == 0.3), (1,))
    calm = sweep(lambda width, rate, seed: 2 + seed * (rate == 0.3), (1,))
    reduction = calm.reduction(plain, 1)
    assert reduction.value == pytest.approx(0.3 / 7)
    assert reduction.low == pytest.approx(0.3 / 7)
    assert plain.sensitivity(1).low < calm.sensitivity(1).value
    assert plain.reduction(calm, 1).value == pytest.approx(-0.3 / 7)


@pytest.mark.parametrize(
    ("other", "message"),
    [({"seeds": (0, 1)}, "seeds: got"), ({"rates": (0.1, 0.2)}, "learning_rates: got")],
    ids=["seeds", "learning rates"],
)
def test_sweeps_that_cannot_be_paired_are_refused(other, message):
    with pytest.raises(ValueError, match=message):
        sweep(lambda *_: 2.0).reduction(sweep(lambda *_: 2.0, **other), 1)


def test_a_run_that_is_missing_is_named():
    made = sweep(lambda *_: 2.0)
    without = tuple(each for each in made.runs if (each.width, each.learning_rate, each.seed) != (2, 0.01, 1))
    with pytest.raises(ValueError, match=re.escape("none of width 2, learning rate 0.01, seed 1")):
        LearningRateSweep("planted", "own", 10, without)
    with pytest.raises(ValueError, match="once"):
        LearningRateSweep("planted", "own", 10, (*made.runs, made.runs[0]))
    with pytest.raises(ValueError, match="runs: got 0"):
        LearningRateSweep("planted", "own", 10, ())
    with pytest.raises(ValueError, match="width: got 3; allowed: 1, 2, 4, 8"):
        made.best(3)


def test_runs_that_failed_count_with_the_initial_loss_and_are_counted():
    runs = [
        run(1, 1e-3, 0, 2.0),
        run(1, 1e-2, 0, math.inf, status="nan"),
        run(1, 1e-1, 0, 3.0, status="diverged"),
        run(1, 3e-1, 0, 8.0, status="diverged"),
    ]
    made = LearningRateSweep("planted", "own", 10, tuple(runs))
    assert made.losses(1) == {1e-3: (2.0,), 1e-2: (INITIAL,), 1e-1: (3.0,), 3e-1: (INITIAL,)}
    assert made.failed(1) == 3
    assert made.sensitivity(1).value == pytest.approx((3.5 + 1 + 3.5) / 4)
    assert "3 failed" in str(made)


def test_as_plain_values_it_is_json():
    made = sweep(
        lambda width, rate, seed: math.inf if rate > 0.2 else bowl(lambda *_: 0.01)(width, rate, seed)
    )
    values = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert values["widths"]["8"]["best"]["learning_rate"] == 0.01
    assert values["widths"]["8"]["sensitivity"]["value"] == pytest.approx(made.sensitivity(8).value)
    assert values["drift"]["grid_steps"] == 0
    assert len(values["runs"]) == 4 * 7 * 3
    assert {each["loss"] for each in values["runs"] if each["learning_rate"] == 0.3} == {None}
    assert tuple(map(SweepRun.from_dict, values["runs"])) == made.runs


def test_as_text_it_is_a_table_of_widths():
    lines = str(sweep(bowl(lambda width, seed: 0.01))).splitlines()
    assert lines[0] == "planted, own, 10 steps, 3 seeds"
    assert [line.split()[0] for line in lines[2:6]] == ["1", "2", "4", "8"]
    assert lines[6].startswith("drift: ")


def test_the_plot_is_an_svg_with_a_line_a_width(tmp_path):
    pytest.importorskip("matplotlib")
    made = sweep(bowl(lambda width, seed: 0.01 / width))
    path = made.plot(tmp_path / "sweep.svg")
    text = path.read_text()
    assert ET.fromstring(text).tag.endswith("svg")
    for width in made.widths:
        assert f"width {width}: sensitivity {made.sensitivity(width)}" in text
    assert "learning rate" in text
    assert text == made.plot(str(tmp_path / "new" / "again.svg")).read_text()


def test_a_plot_of_another_kind_is_refused(tmp_path):
    pytest.importorskip("matplotlib")
    made = sweep(bowl(lambda width, seed: 0.01))
    with pytest.raises(ValueError, match=r"path: got .*sweep\.png'; allowed: a name ending in \.svg"):
        made.plot(tmp_path / "sweep.png")
    assert list(tmp_path.iterdir()) == []

"""Verdicts on made-up series of losses, of which it is known what is wrong, and where."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stackwise.prototype import DivergenceRule, SpikeRule, loss_verdict


def falling(steps, seed=0, noise=0.1, first=5.5, last=2.5):
    """A loss as healthy trainings have it."""
    chance = random.Random(seed)
    return [last + (first - last) * math.exp(-8 * i / steps) + chance.gauss(0, noise) for i in range(steps)]


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("steps", [10, 100, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_is_a_success(steps, noise, seed):
    verdict = loss_verdict(falling(steps, seed, noise), [1.0] * steps)
    assert (verdict.status, verdict.step, verdict.spikes) == ("success", None, ())


@pytest.mark.parametrize("level", [0.1, 3.0])
def test_a_loss_that_only_wavers_is_a_success(level):
    losses = [level + 0.05 * math.sin(i / 7) for i in range(400)]
    assert loss_verdict(losses).status == "success"


@pytest.mark.parametrize("steps", [8, 10, 20, 50])
@pytest.mark.parametrize("noise", [0.15, 0.3])
def test_noise_alone_hardly_ever_diverges(steps, noise):
    chance = random.Random(steps)
    runs = [[3.0 + chance.gauss(0, noise) for _ in range(steps)] for _ in range(300)]
    assert sum(loss_verdict(losses).status == "diverged" for losses in runs) <= 9


def test_one_low_loss_at_the_start_is_no_divergence():
    losses = [5.21, 5.47, 5.55, 5.56, 5.51, 5.49, 5.28, 5.51, 5.51, 5.52]  # of ten sound updates
    assert loss_verdict(losses).status == "success"
    rising = [5.21, 5.47, 5.9, 6.6, 7.1, 7.4, 8.3, 8.6, 9.1, 9.5]
    assert (loss_verdict(rising).status, loss_verdict(rising).step) == ("diverged", 2)


def test_divergence_step_ignores_an_accidentally_low_first_loss():
    sound = [5.5 - 0.6 * i / 399 for i in range(400)]
    up = [6.5 + 0.02 * math.sin(i) for i in range(100)]
    for first in (5.5, 3.0):
        verdict = loss_verdict([first, *sound, *up])
        assert (verdict.status, verdict.step) == ("diverged", 401)


def test_of_fewer_losses_than_its_history_nothing_has_diverged():
    losses = [2.0, 2.1, 9.0, 9.1, 9.0, 9.2, 9.1, 9.0]
    assert [loss_verdict(losses[:n]).status for n in (7, 8)] == ["success", "diverged"]
    assert loss_verdict(losses[:7], divergence=DivergenceRule(history=7)).step == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_loss_that_is_no_number_ends_it(value):
    losses = falling(100)
    losses[37], losses[60] = value, math.nan
    verdict = loss_verdict(losses, [1.0] * 100)
    assert (verdict.status, verdict.step) == ("nan", 37)


def test_a_gradient_that_is_no_number_counts_as_a_loss_does():
    norms = [1.0] * 100
    norms[12] = math.inf
    losses = falling(100)
    losses[50] = math.nan
    assert (loss_verdict(losses, norms).status, loss_verdict(losses, norms).step) == ("nan", 12)


def test_spikes_are_counted_where_they_begin():
    losses = falling(500)
    for start, length, height in ((100, 1, 3.0), (240, 5, 2.0), (400, 12, 6.0)):
        for i in range(start, start + length):
            losses[i] += height
    verdict = loss_verdict(losses)
    assert (verdict.status, verdict.step, verdict.spikes) == ("spiky", 100, (100, 240, 400))
    assert SpikeRule().spikes(losses) == [range(100, 101), range(240, 245), range(400, 412)]


def test_a_spike_wants_both_its_nats_and_its_spread():
    quiet = [2.0 + 0.001 * (i % 2) for i in range(100)]
    quiet[60] += 0.4  # hundreds of MADs, and no half a nat
    assert loss_verdict(quiet).status == "success"
    assert loss_verdict(quiet, spike=SpikeRule(min_nats=0.3)).spikes == (60,)
    loud = [2.0 + (i % 3) / 2 for i in range(100)]  # MAD 0.5, scaled 0.7413, eight of which are 5.93
    loud[60] = 2.5 + 5.9
    assert loss_verdict(loud).status == "success"
    loud[60] = 2.5 + 6.0
    assert loss_verdict(loud).spikes == (60,)


def test_nothing_is_a_spike_before_there_is_something_to_compare_with():
    losses = [5.0] * 7 + [9.0] + [5.0] * 92
    assert loss_verdict(losses).status == "success"
    losses = [5.0] * 8 + [9.0] + [5.0] * 91
    assert loss_verdict(losses).spikes == (8,)


def test_a_spike_is_no_part_of_what_the_next_is_judged_by():
    losses = [3.0] * 50 + [6.0] * 40 + [3.0] * 10 + [3.6] + [3.0] * 99
    assert SpikeRule().spikes(losses) == [range(50, 90), range(100, 101)]
    assert loss_verdict(losses).status == "spiky"


def test_a_run_that_ends_in_a_spike_is_spiky_while_it_is_short():
    losses = falling(400)
    losses[-4:] = [7.0] * 4
    assert (loss_verdict(losses).status, loss_verdict(losses).step) == ("spiky", 396)


@pytest.mark.parametrize("left", [120, 300, 350])
def test_a_loss_that_never_comes_back_has_diverged_where_it_left(left):
    losses = falling(400)
    losses[left:] = [4.5 + 0.05 * (i % 3) for i in range(400 - left)]  # below where it began
    verdict = loss_verdict(losses)
    assert (verdict.status, verdict.step) == ("diverged", left)


def test_a_loss_that_ends_above_where_it_began_has_diverged():
    losses = [5.5, 6.5, 30.0, *(8.0 + 0.1 * (i % 5) for i in range(200))]
    assert (loss_verdict(losses).status, loss_verdict(losses).step) == ("diverged", 1)


def test_a_slow_rise_has_diverged_where_it_passed_the_margin():
    losses = [3.0] * 200 + [3.0 + 0.01 * i for i in range(200)]
    verdict = loss_verdict(losses)
    assert verdict.status == "diverged"
    assert abs(verdict.step - 225) <= 15  # rises by 0.25; a running median of 40 is some 20 behind
    patient = DivergenceRule(rise_nats=3.0, lost_nats=3.0)
    assert loss_verdict(losses, divergence=patient).status != "diverged"


def test_nan_comes_before_divergence_and_divergence_before_spikes():
    losses = falling(400)
    losses[100] = 9.0
    assert loss_verdict(losses).status == "spiky"
    losses[300:] = [9.0] * 100
    assert (loss_verdict(losses).status, loss_verdict(losses).step) == ("diverged", 300)
    assert loss_verdict(losses).spikes == (100, 300)
    losses[350] = math.nan
    assert (loss_verdict(losses).status, loss_verdict(losses).step) == ("nan", 350)


@given(
    losses=st.lists(st.integers(-64, 64), max_size=60),
    shift=st.integers(-1024, 1024),
)
def test_where_the_zero_of_a_loss_is_does_not_matter(losses, shift):
    """Sums of sixteenths are exact, so that the verdicts are equal and not nearly so."""
    there, elsewhere = [x / 16 for x in losses], [x / 16 + shift for x in losses]
    assert loss_verdict(there) == loss_verdict(elsewhere)


@pytest.mark.parametrize("unit", [1e-6, 1e-2, 1.0, 1e4])
def test_the_unit_of_a_loss_that_is_not_in_nats_does_not_matter(unit):
    rising = [unit * level for level in [1.0] * 500 + [20.0] * 500]
    verdict = loss_verdict(rising, in_nats=False)
    assert (verdict.status, verdict.step) == ("diverged", 500)
    peak = [unit * level for level in [1.0] * 500 + [20.0] * 5 + [1.0] * 495]
    assert loss_verdict(peak, in_nats=False).spikes == (500,)
    sound = [unit * level for level in falling(1000, noise=0.3)]
    assert loss_verdict(sound, in_nats=False).status == "success"


@pytest.mark.parametrize("first", [1.0, math.log(256), math.log(50257)])
def test_a_loss_that_begins_high_has_the_limits_of_nats(first):
    for rise, status in ((0.2, "success"), (0.3, "diverged")):
        losses = [first] * 100 + [first + rise] * 100
        assert loss_verdict(losses, in_nats=False).status == loss_verdict(losses).status == status
    for rise, status in ((0.4, "success"), (0.6, "spiky")):
        losses = [first] * 100 + [first + rise] * 3 + [first] * 100
        assert loss_verdict(losses, in_nats=False).status == loss_verdict(losses).status == status


def test_batches_of_a_loss_of_two_classes_may_differ():
    losses = [0.7 * 0.98**step + 0.02 for step in range(300)]
    losses[200] += 0.2
    losses[250] += 0.3
    assert loss_verdict(losses, in_nats=False).status == "success"
    losses[280] += 0.4
    assert loss_verdict(losses, in_nats=False).spikes == (280,)


def test_a_loss_of_nothing_keeps_the_limits_of_nats():
    assert loss_verdict([0.0] * 100 + [0.2] * 100, in_nats=False).status == "success"
    assert loss_verdict([], in_nats=False).status == "success"
    # What is asked for is in the unit of the losses.
    given = {"spike": SpikeRule(min_nats=2.0), "divergence": DivergenceRule(rise_nats=2.0, lost_nats=2.0)}
    assert loss_verdict([0.01] * 100 + [1.0] * 100, in_nats=False, **given).status == "success"


@given(
    losses=st.lists(st.floats(-10, 10), min_size=1, max_size=60),
    place=st.integers(0, 59),
    value=st.sampled_from([math.nan, math.inf]),
)
def test_nothing_behind_the_first_broken_step_is_read(losses, place, value):
    place = place % len(losses)
    broken = [*losses[:place], value, *losses[place + 1 :]]
    verdict = loss_verdict(broken)
    assert (verdict.status, verdict.step) == ("nan", place)
    assert verdict == loss_verdict([*losses[:place], value])
    assert all(spike < place for spike in verdict.spikes)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_of_hardly_a_run_hardly_anything_is_said(steps):
    assert loss_verdict([5.0, 9.0][:steps]).status == "success"


@pytest.mark.parametrize(
    "rule, key, value",
    [
        (SpikeRule, "n_mads", 0.0),
        (SpikeRule, "min_nats", math.inf),
        (SpikeRule, "window", 0),
        (SpikeRule, "history", 1.5),
        (DivergenceRule, "rise_nats", -1.0),
        (DivergenceRule, "lost_nats", math.nan),
        (DivergenceRule, "window", 0),
        (DivergenceRule, "history", 2),
    ],
)
def test_numbers_that_are_no_rule_are_refused(rule, key, value):
    with pytest.raises(ValueError, match=f"{key}: got"):
        rule(**{key: value})

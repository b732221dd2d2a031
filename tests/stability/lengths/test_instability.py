"""Instability of a training at a length: runs whose losses and norms are given, and what is said of them."""

import math

import pytest

from stackwise.stability import Alarm, NanInjection, StabilityRun, StepRecord
from stackwise.stability.lengths.instability import LengthLimits, SeedRun, find_instabilities, reference_norms

# Norms of a sound training, which scatter a little.
SOUND = [1.0, 1.1, 0.95, 1.05, 1.0, 0.9, 1.1, 1.0, 1.05, 0.95, 1.0, 1.1]


def run(norms=SOUND, losses=None, **changes):
    losses = [2.0] * len(norms) if losses is None else losses
    records = [
        StepRecord(step, loss, norm, 1e-3, False)
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    ]
    empty = {"alarms": (), "faults": (), "fired": (), "finite": True}
    return StabilityRun("m", 8, records, steps=len(norms), **(empty | changes))


def changed(step, norm):
    return [*SOUND[:step], norm, *SOUND[step + 1 :]]


def kinds(seen, **limits):
    return [(trouble.kind, trouble.step) for trouble in find_instabilities(seen, LengthLimits(**limits))]


def test_sound_training_is_in_no_trouble():
    assert kinds(run()) == []
    assert kinds(run(), reference_norms=tuple(SOUND)) == []


@pytest.mark.parametrize("step", [4, 8, 11])
@pytest.mark.parametrize(
    ("norm", "spike"),
    [(2.9, False), (3.5, True), (100.0, True)],
)
def test_spike_is_three_times_the_level_of_those_before(step, norm, spike):
    assert kinds(run(changed(step, norm))) == ([("spike", step)] if spike else [])


def test_scatter_widens_what_a_spike_is():
    # The changes of the logarithm are ln 4, 0, -ln 4, 0 and so on, and their MAD is ln 4. The level is 2.
    wild = [1.0, 4.0, 4.0, 1.0] * 3
    assert kinds(run(wild)) == []
    assert kinds(run([*wild, 2.0 * 4**6 - 1])) == []
    assert kinds(run([*wild, 2.0 * 4**6 + 1])) == [("spike", 12)]


def test_first_steps_cannot_be_judged_by_those_before():
    assert kinds(run(changed(3, 50.0))) == []
    # But by those of the shortest length: 4 times 3 times as much.
    assert kinds(run(changed(3, 50.0)), reference_norms=tuple(SOUND)) == [("spike", 3)]
    assert kinds(run(changed(3, 11.0)), reference_norms=tuple(SOUND)) == []


@pytest.mark.parametrize(
    ("factor", "times", "grows"), [(4.0, 3.9, False), (4.0, 4.1, True), (8.0, 7.0, False)]
)
def test_norms_are_held_against_the_shortest_length_at_the_same_step(factor, times, grows):
    falling = [100.0 * 0.5**step for step in range(12)]
    seen = run([norm * times for norm in falling])
    found = kinds(seen, reference_norms=tuple(falling), gradient_factor=factor)
    assert found == ([("gradient growth", None)] if grows else [])
    assert kinds(seen) == []


def test_growth_of_zero_says_nothing():
    assert kinds(run([0.0] * 12), reference_norms=(0.0,) * 12) == []


@pytest.mark.parametrize(
    ("last", "diverges"),
    [(2.4, False), (2.6, True)],
)
def test_loss_that_ends_above_its_beginning(last, diverges):
    losses = [2.0] * 3 + [2.2] * 6 + [last] * 3
    assert kinds(run(losses=losses)) == ([("divergence", None)] if diverges else [])
    assert kinds(run(losses=losses), loss_tolerance=1.0) == []


@pytest.mark.parametrize(("last", "diverges"), [(8.4, False), (8.6, True)])
def test_loss_that_scatters_may_end_higher(last, diverges):
    # The changes are 1, 0, -1, 0 and so on, and their MAD is 1: from 3 on the median may be 6 nats higher.
    losses = [2.0, 3.0, 3.0, 2.0] * 3 + [last, last + 1, last + 1, last]
    assert kinds(run([1.0] * 16, losses=losses)) == ([("divergence", None)] if diverges else [])


def test_short_training_does_not_diverge():
    assert kinds(run([1.0] * 7, losses=[1.0] * 3 + [9.0] * 4)) == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("non-finite loss", "non-finite"),
        ("non-finite gradient", "non-finite"),
        ("gradient spike", "spike"),
        ("loss spike", "spike"),
        ("logit growth", "spike"),
    ],
)
def test_alarms_of_the_guard(kind, said):
    alarms = [Alarm(5, kind, math.nan), Alarm(7, kind, math.nan)]
    assert kinds(run(alarms=alarms)) == [(said, 5)]


def test_one_of_a_kind_and_the_first_of_it():
    alarms = [Alarm(9, "gradient spike", 100.0), Alarm(10, "non-finite loss", math.nan)]
    norms = changed(6, 50.0)
    assert kinds(run(norms, alarms=alarms)) == [("spike", 6), ("non-finite", 10)]


def test_weights_that_are_not_finite():
    assert kinds(run(finite=False)) == [("non-finite", None)]


def test_under_faults_the_run_itself_is_the_judge():
    fault = NanInjection(step=6)
    alarm = Alarm(6, "non-finite loss", math.nan)
    norms = changed(6, math.nan)
    broken = {"faults": (fault,), "fired": (6,)}
    assert kinds(run(norms, alarms=[alarm], **broken)) == []
    assert kinds(run(norms, **broken)) == [("fault", None)]


def test_reference_is_the_median_of_the_seeds_that_are_sound():
    runs = [SeedRun(seed, run([norm] * 3), ()) for seed, norm in enumerate([1.0, 2.0, 9.0])]
    assert reference_norms(runs) == (2.0, 2.0, 2.0)
    trouble = find_instabilities(run(finite=False), LengthLimits())
    assert reference_norms([*runs[:2], SeedRun(2, run([9.0] * 3), trouble)]) == (1.5, 1.5, 1.5)
    assert reference_norms([SeedRun(0, run(), trouble)]) == ()


def test_norms_that_are_not_numbers_are_infinite():
    seen = SeedRun(3, run([1.0, math.nan, math.inf]), ())
    assert seen.gradient_norms == [1.0, math.inf, math.inf]
    assert seen.to_dict()["seed"] == 3
    assert seen.to_dict()["losses"] == [2.0, 2.0, 2.0]

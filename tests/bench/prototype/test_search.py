"""What the bench finds out about searches: over a grid, killed, and shared."""

import itertools
import json
import math
import random
from dataclasses import replace

import pytest

from bench.prototype import search
from bench.prototype.search import QUICK, RANDOM, WAYS, killed_search, paired, shared_search
from bench.prototype.trained_grid import TrainedGrid, key_of
from stackwise.prototype.search import TrialOutcome

PLAN = replace(QUICK, heads=3, layers=3, d_ff_ratios=(1, 2), budget=6, repeats=2)
SPACE = PLAN.space()


@pytest.fixture(scope="module")
def grid():
    outcomes = {}
    for number, values in enumerate(SPACE.points()):
        config = SPACE.config(values)
        failed = number % 5 == 4
        loss = math.inf if failed else 4.0 - 0.01 * number
        outcome = TrialOutcome("nan" if failed else "success", loss, 1000.0 / (number + 1), 2**20, "")
        outcomes[key_of(config)] = outcome
    return TrainedGrid(outcomes)


def test_every_configuration_of_the_space_has_a_key_of_its_own(grid):
    assert len(grid.outcomes) == SPACE.size == 36


def test_the_space_of_the_full_plan_can_be_gone_through():
    space = search.Plan().space()
    assert space.size == 6 * 4 * 3 * 4
    few = list(itertools.islice(space.points(), 0, None, 40))
    assert len({key_of(space.config(values)) for values in few}) == len(few) == 8


def test_an_evaluation_is_a_look_up(grid):
    config = SPACE.config(SPACE.sample(random.Random(0)))
    assert grid(config, 7, search._unheard) is grid.outcomes[key_of(config)]


def test_hypervolume_is_a_share_of_all_that_there_is(grid):
    everything = list(grid.outcomes.values())
    assert grid.share_of_hypervolume(iter(everything)) == pytest.approx(1.0)
    assert grid.share_of_hypervolume(iter(())) == 0.0
    assert 0.0 < grid.share_of_hypervolume(iter(everything[10:12])) < 1.0
    assert grid.share_of_hypervolume(o for o in everything if o.status != "success") == 0.0


def test_hypervolume_of_points_matches_hand_computation():
    losses, rates = (2.0, 3.0, 4.0), (1.0, 2.0, 4.0)
    made = {(i, 1, 1, 1, 1.0): TrialOutcome("success", losses[i], rates[i], 1) for i in range(3)}
    grid = TrainedGrid(made)
    # Against (4, log2 1): of all, only the middle point is better in both coordinates than the reference.
    assert grid.share_of_hypervolume(iter([made[1, 1, 1, 1, 1.0]])) == pytest.approx(1.0)
    assert grid.share_of_hypervolume(iter([made[2, 1, 1, 1, 1.0]])) == 0.0


def test_random_recipe_is_reproducible_per_seed_and_may_repeat_draws(grid):
    [one], [same], [other] = (list(search.sample(SPACE, grid, 30, repeat)) for repeat in (0, 0, 1))
    assert one == same
    assert one != other
    assert one["trials"] == 30


@pytest.mark.parametrize("way", WAYS)
def test_a_search_has_its_budget_of_trials(grid, way):
    [found] = search.search(SPACE, grid, 6, 0, way)
    assert found["trials"] == 6
    assert found["best_score"] <= grid.best_score
    assert 0.0 <= found["hypervolume"] <= 1.0


def test_differences_are_of_the_same_repeat():
    found = paired([1.0, 12.0, 103.0], [0.0, 10.0, 100.0])
    assert found["mean"] == pytest.approx(2.0)
    assert 1.0 <= found["low"] < 2.0 < found["high"] <= 3.0


def figures(grid, repeats=2):
    plan = replace(PLAN, repeats=repeats)
    found = {
        f"{way}; {repeat}": {"best_score": -2.0 + place, "hypervolume": 0.5 + 0.1 * place}
        for place, way in enumerate((RANDOM, *WAYS))
        for repeat in range(2)
    }
    studies = {"killed": {"lost": 0, "running_at_kill": 1}, "shared": {"done_twice": 1}}
    return search.figures(plan, SPACE, grid, found, studies)


def test_bars_are_of_the_low_end(grid):
    made = json.loads(json.dumps(figures(grid), allow_nan=False))
    values = [bar.value for bar in search.bars(made, whole=True)]
    assert values == [pytest.approx(2.0), pytest.approx(0.4), pytest.approx(0.3), 0.0, 1.0]
    lines = search.rows(made).splitlines()
    assert lines[2].startswith(f"| {RANDOM} | -2.000 | +0.000 [+0.000, +0.000] | 50.0% |")
    assert search.table(made).row_count == 1 + len(WAYS)


def test_sampler_with_missing_repeats_is_left_out(grid):
    made = figures(grid, repeats=3)
    assert made["ways"] == {}
    assert [bar.value for bar in search.bars(made, whole=False)][:3] == [None] * 3


@pytest.mark.slow
def test_killed_study_resumes_without_lost_trials():
    [found] = killed_search(6, 0.2)
    assert found["ended_before"] >= 3
    assert (found["running_at_kill"], found["lost"], found["done_twice"]) == (1, 0, 0)


@pytest.mark.slow
def test_shared_study_runs_no_trial_twice():
    [found] = shared_search(6, 0.2)
    assert (found["done"], found["done_twice"]) == (6, 0)

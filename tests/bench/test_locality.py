"""What the benchmark of locality runs, and which losses it holds against which."""

import pytest

from bench.locality import BUDGETS, RACKWISE, RECIPES, SEEDS, bars, jobs_of, losses, name_of, trains_all
from bench.marked_tables import recorded


def runs(**of_recipes):
    """Losses of every run: 2 for the Rack, 1.98 after twice the tokens, 2.1 for other recipes."""
    made = {}
    for recipe, tokens, seed in jobs_of(BUDGETS, SEEDS):
        usual = 2.1 if recipe != RACKWISE else 2.0 if tokens <= BUDGETS[-1] else 1.98
        loss = of_recipes.get(recipe, usual) + 0.001 * (seed - 1)
        made[name_of(recipe, tokens, seed)] = {"recipe": recipe, "tokens": tokens, "validation": loss}
    return made


def test_every_run_once_and_the_long_ones_first():
    jobs = jobs_of(BUDGETS, SEEDS)
    assert len(jobs) == len(set(jobs)) == len(RECIPES) * len(BUDGETS) * len(SEEDS) + len(SEEDS)
    assert [tokens for _, tokens, _ in jobs] == sorted((tokens for _, tokens, _ in jobs), reverse=True)
    assert jobs[0] == (RACKWISE, 2 * BUDGETS[-1], SEEDS[0])


def test_which_recipes_end_with_the_whole_rack():
    assert {recipe for recipe in RECIPES if trains_all(recipe)} == {
        "rackwise",
        "rackwise, growing",
        "blockwise, polish 1/4",
        "blockwise, overlap 1, polish 1/4",
        "stackwise, overlap 1",
    }


def test_bars_hold_the_best_against_the_rack():
    made = bars(runs(**{"blockwise, polish 1/4": 2.02, "stackwise": 2.08}), BUDGETS)
    assert [(bar.name, pytest.approx(bar.value), bar.verdict) for bar in made] == [
        ("rackwise gains from twice the tokens", 0.01, "PASS"),
        ("blockwise, polish 1/4 / rackwise", 1.01, "PASS"),
        ("stackwise / rackwise, never all at once", 1.04, "SHORT"),
    ]


def test_without_runs_nothing_is_measured():
    assert [bar.verdict for bar in bars({}, BUDGETS)] == ["NOT MEASURED"] * 3
    assert losses(runs(), RACKWISE, 2 * BUDGETS[-1]) == pytest.approx([1.979, 1.98, 1.981])


def test_bars_on_file_are_those_of_its_runs():
    record = recorded("locality")
    made = bars(record["figures"]["runs"], BUDGETS)
    assert [bar.to_dict() for bar in made] == record["bars"]

"""What the bench makes of losses and speeds of architectures, small and large."""

import json

import pytest

from bench.prototype import ranks
from bench.prototype.part import Work
from bench.prototype.ranks import FULL_SIZE, Found, Plan
from bench.prototype.runs import RunStore

NAMES = ("gqa", "mqa", "kernel", "untied")
PLAN = Plan(architectures=NAMES, seeds=(0, 1), measurements=1)


def found(chapter_losses=(3.0, 3.0, 3.0)):
    full = {name: [1.0 + i, 1.1 + i] for i, name in enumerate(NAMES)}
    small = {name: [2.0 + i, 2.2 + i] for i, name in enumerate(NAMES)}
    three = dict(zip(NAMES[:3], ([loss, loss] for loss in chapter_losses), strict=True))
    losses = {FULL_SIZE: full, "ours": small, "quarter": small, "chapter": three}
    speeds = {size: {name: [10.0 * (i + 1)] for i, name in enumerate(of)} for size, of in losses.items()}
    speeds["ours"] = {name: [1 / (i + 1)] for i, name in enumerate(NAMES)}
    errors = {size: {} for size in losses} | {"chapter": {"untied": "zero heads"}}
    sizes = {size: dict.fromkeys(of, 100) for size, of in losses.items()}
    notes = {**dict.fromkeys(NAMES, ()), "mqa": ("query heads per key/value head: 2 instead of 8",)}
    rates = {size: {name: {1e-3: each[0]} for name, each in of.items()} for size, of in losses.items()}
    best = {size: dict.fromkeys(of, 1e-3) for size, of in losses.items()}
    at_one_rate = losses | {"ours": {name: [-each for each in small[name]] for name in NAMES}}
    return Found(rates, best, losses, at_one_rate, speeds, errors, sizes, notes)


def test_correlations():
    said = ranks.correlations(found())
    assert said["ours"]["loss"]["rho"] == 1.0
    assert said["ours"]["speed"]["rho"] == -1.0
    assert said["chapter"]["loss"]["rho"] == 0.0  # all alike: no order
    assert said["chapter"]["loss"]["n"] == 3
    assert said["chapter"]["ours_on_these"]["loss"]["n"] == 3
    assert said["chapter"]["errors"] == {"untied": "zero heads"}
    assert said["ours"]["without_notes"]["loss"]["n"] == 3
    assert found().between_seeds().rho == 1.0
    assert found().between_measurements().n == 0


def test_regret_is_what_the_choice_costs_at_full_size():
    assert found().regret("ours") == pytest.approx(0.0)
    assert found(chapter_losses=(3.0, 4.0, 2.0)).regret("chapter") == pytest.approx(2.0)
    # Of full size they have 1.05, 2.05 and 3.05: of two alike one is as good a choice as the other.
    assert found(chapter_losses=(3.0, 3.0, 4.0)).regret("chapter") == pytest.approx(0.5)
    assert found(chapter_losses=(3.0, 3.0, 3.0)).regret("chapter") == pytest.approx(1.0)


def test_bars_wait_for_all_runs():
    values = {bar.name: bar.value for bar in ranks.bars(found(), PLAN)}
    assert values == {"ranks: Spearman of loss": 1.0, "ranks: Spearman of tokens/s": -1.0}
    more = Plan(architectures=(*NAMES, "mha"), measurements=1)
    assert {bar.value for bar in ranks.bars(found(), more)} == {None}


def test_figures_go_through_json_and_become_a_table_and_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    made = ranks.figures(found(), PLAN)
    read = json.loads(json.dumps(made, allow_nan=False))
    lines = ranks.rows(read).splitlines()
    assert lines[2].startswith("| `create_small_variant(config, factor=4)` | 4 of 4 | 1.00 [")
    assert "| 3 of 4 | 0.00 [0.00, 0.00] of 3 |" in lines[4]
    assert lines[5].startswith("| the first, of what it has no note about | 3 of 4 | 1.00 [")
    assert read["between_seeds_stepped_up"] == 1.0
    assert "one learning rate for all of a size | | -1.00 [" in lines[6]
    assert "of 4; for the mean of two 1.00 | - of 0 |" in lines[7]
    assert lines[8].startswith("| the first, one run against another | | 1.00 [")
    for name in ("one.svg", "two.svg"):
        ranks.draw(read, tmp_path / name)
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()
    assert "validation loss, nats" in (tmp_path / "one.svg").read_text()
    assert ranks.table(found()).row_count == len(NAMES) + 2


def test_a_run_is_of_its_configuration():
    one, two = (PLAN.config("gqa", "ours", rate, 0) for rate in (1e-3, 2e-3))
    assert ranks._name("ours", "gqa", one) != ranks._name("ours", "gqa", two)
    assert ranks._name("ours", "gqa", one) == ranks._name("ours", "gqa", PLAN.config("gqa", "ours", 1e-3, 0))


def test_what_is_one_model_is_trained_once():
    configs = {name: PLAN.config(name, "chapter", 1e-3, 0) for name in ("gqa", "mla", "kernel")}
    assert len({ranks._name("chapter", name, config) for name, config in configs.items()}) == 1


@pytest.mark.parametrize("loss", [None, float("nan"), float("inf")], ids=str)
def test_a_loss_that_is_none_is_the_worst(loss):
    assert ranks._loss({"validation_loss": loss}) == float("inf")


class MadeUp(Work):
    """Runs that come to what is said here, without any training: a wide model wants a small learning rate."""

    def complete(self, runs, plan, **_):
        return {name: getattr(self, plan["what"])(run.args[0]) for name, run in runs.items()}

    def training(self, config):
        best = 2e-3 if config.model.d_model > 64 else 8e-3
        rate = config.training.optimizer.lr
        more = 0.1 * (config.model.d_ff < 100)
        loss = float("nan") if rate > 10 * best else 2.0 + abs(rate - best) + more
        return {"validation_loss": loss, "parameters": config.model.d_model}

    def speed(self, configs):
        return {name: 1e6 / config.model.d_ff for name, config in configs.items()}


def test_each_is_trained_with_the_learning_rate_that_is_best_for_it(tmp_path, monkeypatch):
    names = ("gqa", "mha", "two heads of 64", "d_ff / 4", "d_ff x 2")
    plan = Plan(architectures=names, learning_rates=(1e-3, 2e-3, 8e-3, 3.2e-2, 6.4e-2), measurements=1)
    monkeypatch.setattr(ranks, "QUICK", plan)
    part = ranks.measure(MadeUp(True, RunStore(tmp_path / "runs.jsonl")))
    best = part.figures["best_learning_rate"]
    assert best[FULL_SIZE] == dict.fromkeys(names, 2e-3)
    assert best["ours"] == dict.fromkeys(names, 8e-3)
    # From the middle of the grid on, where the loss falls.
    tried = part.figures["learning_rates"]
    assert tried["ours"]["gqa"].keys() == {"0.002", "0.008", "0.032"}
    assert tried[FULL_SIZE]["gqa"].keys() == {"0.001", "0.002", "0.008", "0.032"}
    assert tried[FULL_SIZE]["gqa"]["0.032"] is None
    assert part.figures["losses"][FULL_SIZE] == {
        name: pytest.approx([2.1 if name == "d_ff / 4" else 2.0] * 2) for name in names
    }
    assert list(part.figures["shrinks"]["chapter"]["errors"]) == ["two heads of 64"]
    assert part.figures["shrinks"]["ours"]["errors"] == {}
    speed = {bar.name: bar.value for bar in part.bars}["ranks: Spearman of tokens/s"]
    assert speed == part.figures["shrinks"]["ours"]["speed"]["rho"] > 0.8
    json.dumps(part.figures, allow_nan=False)

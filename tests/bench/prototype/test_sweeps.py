"""Transfer and sensitivity in the bench: what losses that are made up come to, and which runs are made."""

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.prototype import RunStore, Work, sensitivity, transfer
from stackwise.prototype.sweep_result import LearningRateSweep
from stackwise.prototype.sweep_run import SweepRun


def sweep_of(plan, best_of, depth=lambda rate, seed: 0.0):
    """Losses that are lowest, 2, at `best_of(width)`, and more by `depth`."""
    made = plan.runs()
    runs = tuple(
        SweepRun(
            each.width,
            each.learning_rate,
            each.seed,
            2
            + 0.01 * math.log(each.learning_rate / best_of(each.width)) ** 2
            + depth(each.learning_rate, each.seed),
            5.5,
            "success",
            None,
            1.0,
            9.0,
            90.0,
        )
        for each in made
    )
    return LearningRateSweep("planted", plan.parametrization or "own", plan.steps, runs)


@pytest.fixture
def transfers():
    plan = transfer.Plan()
    return {
        transfer.MUP: sweep_of(plan.sweep("mup"), lambda width: 2**-7),
        transfer.STANDARD: sweep_of(plan.sweep("standard"), lambda width: 2**-7 / width),
    }


def test_a_drift_is_counted_in_octaves(transfers):
    [bar] = transfer.bars(transfers)
    assert (bar.value, bar.verdict) == (0.0, "PASS")
    [bar] = transfer.bars({transfer.MUP: transfers[transfer.STANDARD]})
    assert (bar.value, bar.verdict) == (3.0, "SHORT")


def test_a_best_learning_rate_at_an_end_of_the_grid_is_not_measured():
    beyond = sweep_of(transfer.Plan().sweep("mup"), lambda width: 2**-20)
    assert [bar.verdict for bar in transfer.bars({transfer.MUP: beyond})] == ["NOT MEASURED"]
    assert [bar.verdict for bar in transfer.bars({})] == ["NOT MEASURED"]


def test_mup_and_standard_sweeps_use_the_same_widths_up_to_8x():
    plan = transfer.Plan()
    of = {name: plan.sweep(name).runs() for name in ("mup", "standard")}
    for name, runs in of.items():
        assert len(runs) == 8 * 4 * 3
        kinds = {run.subject.model.initialization for run in runs}
        assert kinds == {"mup" if name == "mup" else "normal"}
        assert {run.subject.model.d_model for run in runs} == {32, 64, 128, 256}
        assert {run.subject.model.d_model // run.subject.model.n_heads for run in runs} == {16}
    assert {run.subject.model.mup_base_width for run in of["mup"]} == {32}


def test_the_figures_of_transfer_make_a_table_and_a_plot(transfers, tmp_path):
    figures = json.loads(json.dumps({k: v.to_dict() for k, v in transfers.items()}, allow_nan=False))
    lines = transfer.rows(figures).splitlines()
    assert lines[0].startswith("| parametrisation | 1 x | 2 x | 4 x | 8 x |")
    assert lines[2].startswith("| muP | 0.0078 | 0.0078 | 0.0078 | 0.0078 | +0.00")
    assert lines[3].startswith("| standard | 0.0078 | 0.0039 | 0.002 | 0.00098 | -1.00 [-1.00, -1.00] | 3 |")
    assert lines[4].startswith("| muP - standard | | | | | +1.00 [+1.00, +1.00]")
    # By their own best learning rates both come to 2, by that of 1 x the standard one to more, the wider.
    assert lines[10] == "| muP - standard | +0.00 [+0.00, +0.00] | +0.00" + " [+0.00, +0.00] | +0.00" * 2 + (
        " [+0.00, +0.00] |"
    )
    apart = [0.01 * (n * math.log(2)) ** 2 for n in range(4)]
    assert lines[12] == "| standard, that of 1 x | " + " | ".join(f"{2 + each:.3f}" for each in apart) + " |"
    assert [cell.split()[0] for cell in lines[13].split(" | ")[1:]] == ["+0.00", "-0.00", "-0.02", "-0.04"]
    alone = transfer.rows({transfer.MUP: figures[transfer.MUP]})
    assert "- standard" not in alone and len(alone.splitlines()) == 3
    transfer.draw(figures, tmp_path / "transfer.svg")
    assert ET.parse(tmp_path / "transfer.svg").getroot().tag.endswith("svg")
    assert transfer.rows({}) == ""


@pytest.fixture
def remedies():
    plan = sensitivity.Plan(vocab_size=256)
    excess = {
        sensitivity.PLAIN: 0.7,
        sensitivity.QK_NORM: 0.35,
        sensitivity.Z_LOSS: 0.7,
        sensitivity.BOTH: 0.35,
    }
    return {
        name: sweep_of(
            plan.sweep(name),
            lambda width: 3e-3,
            lambda rate, seed, excess=excess[name]: (excess + 0.1 * seed) * (rate > 0.2),
        )
        for name in sensitivity.VARIANTS
    }


def test_a_reduction_is_of_its_base_and_held_to_its_low_end(remedies):
    found = sensitivity.reductions(remedies)
    assert set(found) == {sensitivity.QK_NORM, sensitivity.Z_LOSS, sensitivity.BOTH}
    assert found[sensitivity.QK_NORM].value == pytest.approx(0.35 / 7)
    assert found[sensitivity.BOTH].value == pytest.approx(0, abs=1e-12)  # of that with qk-norm
    by_norm, by_loss = sensitivity.bars(remedies)
    assert by_norm.value == pytest.approx(0.35 / 7)
    assert by_norm.verdict == "PASS"
    assert by_loss.value == pytest.approx(0, abs=1e-9)


def test_without_the_base_there_is_no_bar(remedies):
    del remedies[sensitivity.PLAIN]
    assert [bar.value is None for bar in sensitivity.bars(remedies)] == [True, False]


def test_the_variants_differ_in_nothing_but_the_remedy():
    plan = sensitivity.QUICK
    plain = sensitivity.config_of(sensitivity.PLAIN, plan).to_dict()
    normed = sensitivity.config_of(sensitivity.QK_NORM, plan).to_dict()
    assert normed["model"].pop("qk_norm") == "head"
    assert plain["model"].pop("qk_norm", None) is None
    assert normed == plain
    both = sensitivity.config_of(sensitivity.BOTH, plan).to_dict()
    assert both["training"]["objective"].pop("z_loss") == 1e-4


def test_the_tokenizer_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sensitivity, "TOKENIZERS", tmp_path / "some")
    path = Path(sensitivity.tokenizer_of(300))
    written = path.stat().st_mtime_ns
    assert Tokenizer.from_file(str(path)).get_vocab_size() == 300
    assert sensitivity.tokenizer_of(300) == str(path)
    assert path.stat().st_mtime_ns == written
    config = sensitivity.config_of(sensitivity.BOTH, replace(sensitivity.QUICK, vocab_size=300))
    assert (config.data.tokenizer, config.model.vocab_size) == (str(path), 300)


def test_the_figures_of_sensitivity_make_a_table_and_a_plot(remedies, tmp_path):
    figures = json.loads(json.dumps(sensitivity.figures_of(remedies), allow_nan=False))
    lines = sensitivity.rows(figures).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {name}" for name in sensitivity.VARIANTS]
    assert "0.050 [0.050, 0.050] of plain" in lines[3]
    assert lines[2].endswith("| 2.000 at 0.003 | 90 |")
    sensitivity.draw(figures, tmp_path / "sensitivity.svg")
    assert ET.parse(tmp_path / "sensitivity.svg").getroot().tag.endswith("svg")


def test_runs_are_kept_and_the_time_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "QUICK", transfer.Plan((-9, -8), (1,), 2, (0,), 2))
    work = Work(True, RunStore(tmp_path / "transfer.jsonl"), until=0.0)
    part = transfer.measure(work)
    assert len(part.missing) == 4
    assert part.figures == {}
    assert part.table is None
    assert [bar.verdict for bar in part.bars] == ["NOT MEASURED"]


@pytest.mark.slow
@pytest.mark.parametrize("part", [transfer, sensitivity], ids=["transfer", "sensitivity"])
def test_a_quick_part_is_made_once(part, tmp_path, capfd):
    store = RunStore(tmp_path / "part.jsonl")
    first = part.measure(Work(True, store, jobs=2))
    size = store.path.stat().st_size
    again = part.measure(Work(True, store, jobs=2))
    assert store.path.stat().st_size == size
    assert first.figures == again.figures
    assert first.missing == ()
    json.dumps(first.figures, allow_nan=False)

"""The exercise on sequence lengths: its page, its plots, and a quick run."""

import json

import pytest
import torch

from bench import claim
from bench.length_exercise import FULL, PAGE, PLOTS, QUICK, measure, plot, written
from bench.marked_tables import ROOT, recorded
from bench.planted_lengths import PLANTED, half_sum, planted_spec, untrained_positions


def test_page_is_what_was_measured():
    assert written() == (ROOT / PAGE).read_text()


def test_record_is_of_the_plan_and_finds_what_was_planted():
    figures = recorded("length_exercise")["figures"]
    assert tuple(figures["plan"]["lengths"]) == FULL.lengths
    assert figures["stable"]["first_unstable"] is None
    assert figures["planted"]["first"] == figures["plan"]["planted"] == FULL.planted


def test_plots_show_the_lengths_of_the_record():
    pytest.importorskip("matplotlib")
    figures = recorded("length_exercise")["figures"]
    stable, planted = (PLOTS[kind].read_text() for kind in ("stable", "planted"))
    assert (stable, planted) == (plot("stable"), plot("planted"))
    assert all(f">{length}</text>" in stable for length in FULL.lengths)
    assert "first unstable" not in stable
    assert f"first unstable: {figures['planted']['first']}" in planted


def test_page_says_what_the_plan_is():
    text = " ".join((ROOT / PAGE).read_text().split())
    assert f"an attention window of {FULL.window}" in text
    assert f"{FULL.tokens_per_step} tokens per step" in text
    assert f"From {FULL.planted} positions on" in text
    assert f"a step of {FULL.step}" in text


@pytest.mark.parametrize("mechanism", PLANTED)
@pytest.mark.parametrize("first", [5, 1536])
def test_mechanism_acts_from_its_length_on(mechanism, first):
    spec = planted_spec(mechanism, first)
    clean = {
        "growing logits": planted_spec(mechanism, 10**6),
        "untrained positions": spec.of(lambda: untrained_positions(first, beyond=0.0), causal=True),
        "half-precision sum": spec.of(lambda: half_sum(first, kept_in=torch.float32), causal=True),
    }[mechanism]
    model, twin = spec.create().eval(), clean.create().eval()
    for length, same in ((first - 1, True), (first, False)):
        ids = spec.batch(1, length)
        assert model(ids).isfinite().all() == (same or mechanism == "growing logits")
        if mechanism != "half-precision sum":
            assert model(ids).equal(twin(ids)) == same


@pytest.mark.slow
def test_quick_run_finds_what_is_planted(tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "RESULTS", tmp_path)
    made = claim.Claim("length_exercise", quick=True)
    measure(made, QUICK)
    assert made.conclude() == 0
    [path] = tmp_path.rglob("length_exercise-quick.json")
    figures = json.loads(path.read_text())["figures"]
    assert figures["planted"]["first"] == QUICK.planted
    assert [point["verdict"] for point in figures["stable"]["points"]] == ["stable"] * 3

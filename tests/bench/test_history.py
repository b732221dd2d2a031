"""What bench.history asks is answered with what was stored, and its file says how long it took."""

import json

import numpy as np
import pytest

from bench import claim as claim_module
from bench import history
from stackwise.gate.history.store import Store


@pytest.fixture
def few(monkeypatch, tmp_path):
    monkeypatch.setattr(claim_module, "RESULTS", tmp_path)
    monkeypatch.setattr(history, "QUICK_RUNS", 3)
    monkeypatch.setattr(history, "TESTS", 50)
    monkeypatch.setattr(history, "TIMES", 1)
    return tmp_path


def test_what_was_stored_is_found(few):
    place = few / "history.db"
    history.fill(place, 4)
    asked = {name: ask() for name, ask in history.questions(place, 4).items()}
    assert len(asked["list all tests"]) == 100 and len(asked["list tests by name"]) == 7
    assert len(asked["all points of a test"]) == 2
    assert len(asked["judge ten tests"]) == 10 and asked["plot a test"].startswith("<?xml")
    with Store(place) as store:
        assert sum(series.n_points for series in store.series()) == 4 * 50 + 50


def test_runs_are_the_same_each_time():
    first, second = (history.run_of(7, np.random.default_rng(2)) for _ in range(2))
    assert first == second


@pytest.mark.slow
def test_the_file_has_bars_and_figures(few, capsys):
    assert history.main(["--quick"]) == 0  # 150 results are too few, and not judged
    [file] = few.glob("*/history-quick.json")
    record = json.loads(file.read_text())
    assert [bar["name"] for bar in record["bars"]] == ["results", "slowest question, s"]
    assert record["figures"]["results"] == 150
    assert set(record["figures"]["processes"]) == {"list", "show", "plot"}
    slowest = max(max(taken) for taken in record["figures"]["questions"].values())
    assert record["bars"][1]["value"] == slowest
    assert "judge ten tests" in capsys.readouterr().out

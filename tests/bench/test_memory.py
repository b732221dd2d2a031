"""What the benchmark of memory runs, and what it holds to its limits."""

import pytest
import torch

from bench.marked_tables import recorded
from bench.memory import Run, bars, measured_peak, plan, table
from stackwise.benchmark.memory import peak

BASE = Run("blockwise", 4, 1)


def test_every_unit_is_beside_the_whole_rack():
    names = [run.name for run in plan(BASE)]
    assert len(names) == len(set(names))
    runs = {(run.architecture, run.recompute, run.n_blocks, run.d_model) for run in plan(BASE)}
    for architecture, n_blocks, d_model in [("blockwise", 4, 3072), ("stackwise", 16, 2048)]:
        assert (architecture, "none", n_blocks, d_model) in runs
        assert {("rackwise", kind, n_blocks, d_model) for kind in ("none", "full")} <= runs
    assert ("blockwise", "none", 32, 2048) in runs


def test_bars_are_ratios_of_peaks():
    found = {run.name: {"peak_bytes": 100 if run.architecture == "rackwise" else 30} for run in plan(BASE)}
    made = bars(BASE, found)
    assert len(made) == 7
    for bar in made[:-1]:
        assert bar.value == 0.3
        assert bar.verdict == ("PASS" if bar.name.endswith("4 units") else "SHORT")
    assert (made[-1].value, made[-1].verdict) == (1.0, "PASS")
    assert {bar.judge(quick=True) for bar in made} == {"not judged"}


@pytest.mark.parametrize("found", [{}, {run.name: {"peak_bytes": None} for run in plan(BASE)}])
def test_what_the_system_does_not_say_is_not_measured(found):
    assert {bar.verdict for bar in bars(BASE, found)} == {"NOT MEASURED"}


def test_a_system_without_a_high_water_mark(monkeypatch, tmp_path):
    measured = measured_peak(torch.device("cpu"))
    assert measured is None or 0 < measured <= peak.high_water_mark()
    monkeypatch.setattr(peak, "_STATUS", tmp_path / "none")
    assert measured_peak(torch.device("cpu")) is None
    row = {"peak_bytes": None, "disk_bytes": 0, "seconds": 1.0, "flops": 1e12, "parameters": 7}
    assert list(table({"a": row}).columns[1].cells) == ["-"]


def test_bars_on_file_are_those_of_its_runs():
    record = recorded("memory")
    made = bars(Run(**record["figures"]["shape"]), record["figures"]["runs"])
    assert [bar.to_dict() for bar in made] == record["bars"]

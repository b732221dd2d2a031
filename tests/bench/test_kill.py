"""What the benchmark of killed runs counts."""

import random

import pytest

from bench import kill
from bench.kill import bars, rot, whole_checkpoints
from stackwise.checkpoint import CheckpointManager
from stackwise.checkpoint import manager as manager_module

ROW = {"kills": 100, "within a save": 50, "ended otherwise": 0, "unusable": 0, "half checkpoints": 0}
ROWS = [
    ROW | {"processes": processes, "mode": mode, "steps lost": 3}
    for processes in (1, 2)
    for mode in ("synchronous", "asynchronous")
]
HARM = {"harms": 8, "noticed": 8, "previous one used": 8}


def verdicts(rows=ROWS, harm=HARM):
    return {bar.name: bar.verdict for bar in bars(rows, harm, 200)}


def test_bars_are_met_and_missed():
    assert set(verdicts().values()) == {"PASS"}
    for key, name in [
        ("ended otherwise", "runs that ended otherwise"),
        ("unusable", "unusable states"),
        ("half checkpoints", "half checkpoints"),
    ]:
        assert verdicts([*ROWS[:3], ROWS[3] | {key: 1}])[name] == "SHORT"
    assert verdicts([*ROWS[:3], ROWS[3] | {"kills": 99}])["kills, 2 processes"] == "SHORT"
    assert (
        verdicts([*ROWS[:3], ROWS[3] | {"within a save": 49}])["kills within a save, 2 processes"] == "SHORT"
    )
    assert verdicts([ROWS[0] | {"steps lost": 4}, *ROWS[1:]])["steps lost, synchronous"] == "SHORT"
    assert verdicts(harm=HARM | {"noticed": 7})["damage noticed"] == "SHORT"
    assert verdicts(harm=HARM | {"previous one used": 7})["previous one used"] == "SHORT"
    assert verdicts(harm=None)["damage noticed"] == "NOT MEASURED"


def test_rot_is_counted():
    found = rot(8, seed=1)
    assert (found["noticed"], found["previous one used"]) == (8, 8)
    assert {place["kind"] for place in found["places"]} == {"truncation", "bit flip"}
    assert found["places"] != rot(8, seed=2)["places"]


def test_rot_that_nobody_sees_is_counted_too(monkeypatch):
    monkeypatch.setattr(manager_module, "verify_files", lambda *_, **__: None)
    found = rot(12, seed=1)
    assert found["noticed"] < 12
    assert found["previous one used"] < 12


def test_half_checkpoints_are_counted(tmp_path):
    manager = CheckpointManager(tmp_path)
    assert whole_checkpoints(tmp_path) == (0, 0)
    manager.save(3, {})
    manager.save(4, {})
    assert whole_checkpoints(tmp_path) == (4, 0)
    (tmp_path / "step-4/state-00000.json").unlink()
    assert whole_checkpoints(tmp_path) == (4, 1)


@pytest.mark.slow
def test_a_run_is_killed_and_goes_on(tmp_path):
    digests, seconds, _ = kill.undisturbed(tmp_path / "whole", 1, "synchronous")
    choose = random.Random(0)
    death, _ = kill.disturbed(
        tmp_path / "run", 1, "synchronous", choose, run_seconds=seconds, save_seconds=0.0
    )
    assert death.killed and death.saving
    death, ended = kill.disturbed(
        tmp_path / "run", 1, "synchronous", choose, run_seconds=1e6, save_seconds=None
    )
    assert not death.killed and ended == digests

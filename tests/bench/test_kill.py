"""What the benchmark of killed runs counts."""

import random

import pytest

from bench import claim as claim_module
from bench import kill
from bench.isolated import Ended
from bench.kill import bars, parts, rot, whole_checkpoints
from stackwise.checkpoint import CheckpointManager
from stackwise.checkpoint import manager as manager_module

ROW = {"kills": 100, "within a save": 50, "ended otherwise": 0, "unusable": 0, "half checkpoints": 0}
LOST = {"steps lost": 3, "steps lost, one pending": 6}
ROWS = [
    ROW | {"processes": processes, "mode": mode, "steps lost": 3, "steps lost, one pending": pending}
    for processes in (1, 2)
    for mode, pending in (("synchronous", 3), ("asynchronous", 6))
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
    assert verdicts([ROWS[0] | {"steps lost": 4}, *ROWS[1:]])["steps lost, at once"] == "SHORT"
    assert verdicts([ROWS[0] | {"steps lost, one pending": 4}, *ROWS[1:]])["steps lost, at once"] == "SHORT"
    later = verdicts([ROWS[0], ROWS[1] | {"steps lost": 4}, *ROWS[2:]])
    assert later["steps lost, later, none pending"] == "SHORT"
    later = verdicts([ROWS[0], ROWS[1] | {"steps lost, one pending": 7}, *ROWS[2:]])
    assert later["steps lost, later, 2 x 3"] == "SHORT"
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
    # One that was being replaced has its name back, as a restore gives it.
    (tmp_path / "step-4").rename(tmp_path / ".step-4.999999999.old")
    assert whole_checkpoints(tmp_path) == (4, 0)
    (tmp_path / "step-4/state-00000.json").unlink()
    assert whole_checkpoints(tmp_path) == (4, 1)


def test_parts_add_up_to_what_is_asked():
    for count, harms in ((200, 400), (6, 40)):
        asked = parts(count, harms, seed=3)
        assert asked.pop("rot").args[0].args == (harms, 3)
        given = [call.args[0].args for call in asked.values()]
        assert len(set(asked)) == len({seed for *_, seed in given}) == len(given)
        for world_size in (1, 2):
            chosen = [each for each in given if each[0] == world_size]
            assert {mode for _, mode, *_ in chosen} == set(kill.MODES)
            assert sum(n_kills for _, _, n_kills, _, _ in chosen) == count
            assert sum(n_saves for _, _, _, n_saves, _ in chosen) >= count // 2
            assert all(n_saves <= n_kills for _, _, n_kills, n_saves, _ in chosen)


def test_parts_are_rows_of_one_table():
    part = ROW | {
        "processes": 2,
        "mode": "synchronous",
        **LOST,
        "left a temporary folder": 1,
        "runs": 2,
    }
    other = part | {"mode": "asynchronous"}
    [first, second] = kill._summed([part, other, part | {"steps lost": 2, "unusable": 1}])
    assert (first["mode"], first["kills"], first["steps lost"], first["unusable"]) == (
        "synchronous",
        200,
        3,
        1,
    )
    assert (second["mode"], second["kills"], second["unusable"]) == ("asynchronous", 100, 0)


def test_parts_that_are_there_are_not_asked_again(monkeypatch, tmp_path):
    monkeypatch.setattr(claim_module, "RESULTS", tmp_path)
    asked = []

    def answered(calls, *, jobs, seconds):
        for name, call in calls.items():
            asked.append(name)
            if name == "1 synchronous 2" and len(asked) == 1:
                yield name, Ended([], "its process ended with -9", 1.0)
            elif name == "rot":
                yield name, Ended([HARM | {"places": []}], None, 1.0)
            else:
                world_size, mode, n_kills, n_saves, _ = call.args[0].args
                row = {"kills": n_kills, "within a save": n_saves, "left a temporary folder": 0, "runs": 1}
                yield (
                    name,
                    Ended(
                        [
                            ROW
                            | {"processes": world_size, "mode": mode, **LOST, "steps lost, one pending": 3}
                            | row
                        ],
                        None,
                        1.0,
                    ),
                )

    monkeypatch.setattr(kill, "all_isolated", answered)
    monkeypatch.setattr(kill.torch, "set_num_threads", lambda count: None)
    assert kill.main(["--quick"]) == 1  # one part did not finish
    assert len(asked) == 7
    assert kill.main(["--quick", "--resume"]) == 0
    assert asked[7:] == ["1 synchronous 2"]


def test_what_is_pending_is_counted_by_what_was_asked():
    seen = kill.Seen([""])
    for word, pending in (("asked", 1), ("begin", 1), ("end", 0), ("asked", 1), ("asked", 2), ("end", 1)):
        seen.note(0, word, "3")
        assert seen.missing == pending
        seen.note(1, word, "3")  # what others say of it is the same


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # of Python 3.12, at a fork
@pytest.mark.parametrize("mode", ["asynchronous", "replaced"])
def test_every_mode_ends_as_one_that_nobody_disturbs(tmp_path, mode):
    digests, _, _ = kill.undisturbed(tmp_path / "synchronous", 1, "synchronous")
    assert kill.undisturbed(tmp_path / "run", 1, mode)[0] == digests
    assert whole_checkpoints(tmp_path / "run") == (kill.STEPS, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # of Python 3.12, at a fork
def test_a_run_is_killed_and_goes_on(tmp_path):
    digests, seconds, _ = kill.undisturbed(tmp_path / "whole", 1, "synchronous")
    choose = random.Random(0)
    death, _ = kill.disturbed(
        tmp_path / "run", 1, "synchronous", choose, run_seconds=seconds, save_seconds=0.0
    )
    assert death.killed and death.saving
    death, ended = kill.disturbed(
        tmp_path / "run", 1, "synchronous", choose, run_seconds=0.0, save_seconds=None, spared=True
    )
    assert not death.killed and ended == digests

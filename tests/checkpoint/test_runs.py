"""Runs that share a folder: none counts, deletes or resumes the checkpoints of another."""

import shutil

import pytest

from stackwise.checkpoint import CheckpointManager, CheckpointWarning, DamagedCheckpointError, DirectoryUpload
from stackwise.training import latest_checkpoint


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def save(manager, *steps, value="new"):
    """Save `steps`, of which the first begins a new run in a used folder."""
    with pytest.warns(CheckpointWarning, match="a new run begins with step"):
        manager.save(steps[0], {"state": {"value": value}})
    for step in steps[1:]:
        manager.save(step, {"state": {"value": value}})
    return manager


def restore(manager, step=None):
    """Return the step and the value that are restored."""
    restored = manager.restore({"state": (state := {})}, step)
    return restored.step, state["value"]


@pytest.fixture
def used(tmp_path):
    """A folder with steps 600 and 700 of an earlier run."""
    folder = tmp_path / "used"
    manager = CheckpointManager(folder)
    for step in (600, 700):
        manager.save(step, {"state": {"value": "old"}})
    return folder


def test_new_run_warns_with_the_folder_and_the_steps(used):
    manager = CheckpointManager(used)
    with pytest.warns(
        CheckpointWarning, match=r"used: a new run begins with step 100.*steps 600, 700.*They stay"
    ):
        manager.save(100, {})
    manager.save(200, {})  # without another warning, which would be an error


def test_new_run_keeps_its_own_checkpoints(used):
    manager = save(CheckpointManager(used, keep_last=2), 100, 200, 300)
    assert names_in(used) == ["step-200", "step-300", "step-600", "step-700"]
    assert manager.steps() == [200, 300]
    assert manager.latest() == used / "step-300"


def test_restore_takes_the_run_of_the_manager(used):
    manager = save(CheckpointManager(used), 100)
    assert restore(manager) == (100, "new")


def test_new_process_resumes_the_run_that_saved_last(used):
    save(CheckpointManager(used), 100)
    assert latest_checkpoint(used) == used / "step-100"
    manager = CheckpointManager(used)
    assert manager.latest() == used / "step-100"
    with pytest.warns(
        CheckpointWarning, match=r"several runs.*with steps 100\. Steps 600, 700 are of others"
    ):
        assert restore(manager) == (100, "new")
    manager.save(200, {})  # the same run: no warning
    assert manager.steps() == [100, 200]


def test_earlier_run_can_be_resumed_by_its_step(used):
    save(CheckpointManager(used), 100)
    manager = CheckpointManager(used)
    assert restore(manager, 700) == (700, "old")
    manager.save(800, {"state": {"value": "old"}})
    assert manager.steps() == [600, 700, 800]
    with pytest.warns(CheckpointWarning, match="several runs"):
        assert restore(CheckpointManager(used)) == (800, "old")


def test_resumed_run_keeps_its_identity(used):
    manager = CheckpointManager(used)
    run = manager.restore({}).run
    manager.save(800, {})
    assert CheckpointManager(used).restore({}).run == run
    assert manager.steps() == [600, 700, 800]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_same_step_of_another_run_is_renamed(used, asynchronous):
    run = CheckpointManager(used).restore({}).run
    manager = CheckpointManager(used, asynchronous=asynchronous)
    renamed = rf"step-700 was not written by this run: it is now step-700\.run-{run[:8]}"
    with pytest.warns(CheckpointWarning, match=renamed):
        save(manager, 700).close()
    assert restore(manager) == (700, "new")
    assert restore(manager, 600) == (600, "old")
    shutil.rmtree(used / "step-700")
    (used / f"step-700.run-{run[:8]}").rename(used / "step-700")
    assert restore(CheckpointManager(used), 700) == (700, "old")


def test_saving_below_the_restored_step_begins_a_new_run(used):
    """Such as training that starts from the weights of an earlier run."""
    manager = CheckpointManager(used, keep_last=1)
    assert restore(manager) == (700, "old")
    save(manager, 100, 200)
    assert names_in(used) == ["step-200", "step-600", "step-700"]
    with pytest.warns(CheckpointWarning, match="several runs"):
        assert restore(CheckpointManager(used)) == (200, "new")


def test_restoring_an_earlier_step_begins_a_new_run(used):
    manager = CheckpointManager(used, keep_last=1)
    assert restore(manager, 600) == (600, "old")
    save(manager, 650, 750)
    assert names_in(used) == ["step-600", "step-700", "step-750"]
    assert restore(manager) == (750, "new")


def test_rewind_leaves_other_runs(used):
    manager = save(CheckpointManager(used), 100, 200)
    manager.rewind(150)
    assert names_in(used) == ["step-100", "step-200.damaged", "step-600", "step-700"]


def test_skipped_checkpoints_of_other_runs_stay(used):
    CheckpointManager(used).restore({}, 700)
    manager = CheckpointManager(used)
    manager.restore({})
    manager.rewind(650)
    assert names_in(used) == ["step-600", "step-700.damaged"]
    save(CheckpointManager(used, keep_last=1), 800, 900)
    assert names_in(used) == ["step-600", "step-700.damaged", "step-900"]


def test_best_is_of_the_own_run(tmp_path):
    CheckpointManager(tmp_path).save(600, {}, metric=0.1)
    manager = CheckpointManager(tmp_path, keep_last=1, keep_best=1)
    with pytest.warns(CheckpointWarning, match="a new run"):
        manager.save(100, {}, metric=1.0)
    manager.save(200, {}, metric=2.0)
    manager.save(300, {}, metric=3.0)
    assert manager.best() == tmp_path / "step-100"
    assert names_in(tmp_path) == ["step-100", "step-300", "step-600"]


def test_damaged_run_does_not_fall_back_to_another(used):
    save(CheckpointManager(used), 100)
    (used / "step-100/state-00000.json").write_text("{}")
    with pytest.raises(DamagedCheckpointError, match=r"step-100.*truncated"):
        CheckpointManager(used).restore({})


def test_run_without_a_checkpoint_of_its_own_restores_none(used):
    manager = CheckpointManager(used)
    with pytest.raises(ValueError, match="object"):
        manager.save(100, {"state": {"x": object()}})
    with pytest.warns(CheckpointWarning, match="a new run begins"):
        restored = manager.restore({})
    assert restored is None


def test_uploads_of_another_run_stay(tmp_path):
    there = tmp_path / "there"
    for number in (1, 2):
        here = tmp_path / f"here-{number}"
        with CheckpointManager(here, upload=DirectoryUpload(there, keep_last=1)) as manager:
            if number == 2:
                save(manager, 3)
            for step in (5, 7):
                manager.save(step, {"state": {"value": number}})
                manager._wait_for_uploads()
        if number == 1:
            run = CheckpointManager(here).restore({}).run
    assert names_in(there) == ["step-7", f"step-7.run-{run[:8]}"]
    assert restore(CheckpointManager(there)) == (7, 2)


def test_unreadable_manifest_is_of_no_run(used):
    """Nothing of it is deleted if several runs have used the folder."""
    (used / "step-600/manifest.json").write_text("")
    save(CheckpointManager(used, keep_last=1), 800, 900)
    assert names_in(used) == ["step-600", "step-700", "step-900"]

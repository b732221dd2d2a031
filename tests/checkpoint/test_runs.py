"""Runs that share a folder: none counts, deletes or resumes the checkpoints of another."""

import errno
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from stackwise.checkpoint import CheckpointManager, CheckpointWarning, DamagedCheckpointError
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


def damage(folder):
    (folder / "manifest.json").write_text("{}")


def set_format(folder, number):
    """Make a checkpoint one of another version of stackwise."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text()) | {"format": number}
    content.pop("digest")
    content["digest"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


@pytest.fixture
def stale(monkeypatch):
    """Set of folders whose manifest cannot be read now."""
    folders, read_bytes = set(), Path.read_bytes

    def refusing(self):
        if self.name == "manifest.json" and self.parent in folders:
            raise OSError(errno.ESTALE, "Stale file handle", str(self))
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", refusing)
    return folders


def test_newest_damaged_manifest_is_skipped_with_a_warning(used):
    damage(used / "step-700")
    with pytest.warns(CheckpointWarning, match=r"passed over.*step-700/manifest\.json.*step-700\.damaged"):
        assert restore(CheckpointManager(used)) == (600, "old")
    assert latest_checkpoint(used) == used / "step-600"


def test_manifest_that_cannot_be_read_now_is_an_error(used, stale):
    save(CheckpointManager(used), 100)
    stale.add(used / "step-100")
    manager = CheckpointManager(used)
    for call in (lambda: manager.restore({}), manager.latest, lambda: latest_checkpoint(used)):
        with pytest.raises(OSError, match="Stale file handle"):
            call()
    stale.clear()
    with pytest.warns(CheckpointWarning, match="several runs"):
        assert restore(manager) == (100, "new")


def test_same_step_that_cannot_be_read_now_is_not_replaced(used, stale):
    manager = CheckpointManager(used)
    manager.restore({})
    manager.save(800, {"state": {"value": "first"}})
    stale.add(used / "step-800")
    with pytest.warns(CheckpointWarning, match="step 800 is not written.*Stale"):
        manager.save(800, {"state": {"value": "second"}})
    stale.clear()
    assert restore(manager) == (800, "first")


def test_retention_deletes_nothing_while_a_manifest_cannot_be_read(tmp_path, stale):
    manager = CheckpointManager(tmp_path, keep_last=1, keep_best=1)
    for step in (10, 20):
        manager.save(step, {}, metric=float(step))
    stale.add(tmp_path / "step-10")
    with pytest.warns(CheckpointWarning, match="no checkpoint is deleted this time.*step-10"):
        manager.save(30, {}, metric=30.0)
    assert names_in(tmp_path) == ["step-10", "step-20", "step-30"]
    stale.clear()
    manager.save(40, {}, metric=40.0)
    assert names_in(tmp_path) == ["step-10", "step-40"]


def test_damaged_manifests_are_not_counted_or_deleted(tmp_path):
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (10, 20):
        manager.save(step, {})
    damage(tmp_path / "step-20")
    for step in (30, 40):
        manager.save(step, {})
    assert names_in(tmp_path) == ["step-20", "step-30", "step-40"]
    assert manager.steps() == [30, 40]


def test_checkpoint_of_another_format_is_refused_and_stays(used):
    set_format(used / "step-600", 99)
    manager = CheckpointManager(used, keep_last=1)
    calls = [
        lambda: manager.restore({}),
        lambda: manager.restore({}, 600),
        lambda: manager.verify(600),
        lambda: manager.save(800, {}),
        manager.latest,
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"step-600/manifest\.json: format: got 99; allowed: 3"):
            call()
    assert names_in(used) == ["step-600", "step-700"]


def test_changed_format_number_is_damage(used):
    path = used / "step-700/manifest.json"
    path.write_text(path.read_text().replace('"format": 3', '"format": 4'))
    with pytest.raises(DamagedCheckpointError, match="it was changed since it was written"):
        CheckpointManager(used).verify(700)


def test_run_is_none_until_a_save_or_restore(used):
    manager = CheckpointManager(used)
    assert manager.run is None
    assert manager.latest() == used / "step-700"
    assert restore(manager) == (700, "old")
    assert manager.run == CheckpointManager(used).restore({}).run


def test_begin_run_returns_the_identity_of_the_next_save(used):
    manager = CheckpointManager(used)
    run = manager.begin_run()
    save(manager, 100)
    assert run == manager.run == CheckpointManager(used).restore({}, 100).run

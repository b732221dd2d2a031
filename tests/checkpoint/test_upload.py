"""Uploads: a second copy is whole or not there; whatever becomes of it, the run and the first one go on."""

import errno
import os
import shutil
import signal
import threading
import warnings
from pathlib import Path

import pytest
import torch

from stackwise.checkpoint import CheckpointManager, CheckpointWarning, DamagedCheckpointError, DirectoryUpload

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])


def state(value):
    return {"counts": {"value": value, "x": torch.full((300,), float(value))}}


def restored(directory, step=None):
    counts = {}
    found = CheckpointManager(directory).restore({"counts": counts}, step)
    assert torch.equal(counts["x"], torch.full((300,), float(counts["value"])))
    return found.step, counts["value"]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def content_of(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)


class Gate:
    """An upload that waits until it is let through."""

    def __init__(self):
        self.begun, self.go, self.done = threading.Event(), threading.Event(), []

    def __call__(self, path):
        self.begun.set()
        assert self.go.wait(30)
        assert (path / "manifest.json").exists()
        self.done.append(path.name)


@BOTH
def test_a_copy_is_the_checkpoint(tmp_path, asynchronous):
    here, there = tmp_path / "here", tmp_path / "mnt" / "there"
    with CheckpointManager(here, asynchronous=asynchronous, upload=DirectoryUpload(there)) as manager:
        manager.save(1, state(1), files={"notes.txt": lambda path: path.write_text("x")})
    assert content_of(there) == content_of(here)
    assert names_in(there) == ["step-1"]
    assert restored(there) == (1, 1)
    CheckpointManager(there).verify(1)


def test_a_function_gets_what_is_published(tmp_path):
    seen = []
    with CheckpointManager(tmp_path, upload=lambda path: seen.append((path, content_of(path)))) as manager:
        manager.save(4, state(4))
        manager.wait()
    assert seen == [(tmp_path / "step-4", content_of(tmp_path / "step-4"))]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "gone"), KeyError("mine"), SystemExit(3)], ids=repr)
@BOTH
def test_one_that_fails_is_told_and_nothing_else(tmp_path, error, asynchronous):
    calls = []

    def upload(path):
        calls.append(path.name)
        if len(calls) == 1:
            raise error

    manager = CheckpointManager(tmp_path, asynchronous=asynchronous, upload=upload)
    with pytest.warns(CheckpointWarning, match=rf"step-1 is not uploaded: {type(error).__name__}"):  # noqa: PT031
        assert manager.save(1, state(1)) == tmp_path / "step-1"
        manager.close()
    assert restored(tmp_path) == (1, 1)
    manager.save(2, state(2))
    manager.close()  # without a word
    assert calls == ["step-1", "step-2"]


def test_a_full_storage_keeps_what_it_has(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    upload = DirectoryUpload(there)
    manager = CheckpointManager(here, upload=upload)
    manager.save(1, state(1))
    manager.close()
    before, write = content_of(there), os.write

    def full(descriptor, data):
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(there):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.warns(CheckpointWarning, match=r"step-2 is not uploaded: OSError.*No space left"):  # noqa: PT031
        assert manager.save(2, state(2)) is not None
        manager.close()
    monkeypatch.undo()
    assert content_of(there) == before
    assert names_in(there) == ["step-1"]
    assert (restored(here), restored(there)) == ((2, 2), (1, 1))


def test_what_is_rotten_is_not_copied(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    CheckpointManager(here).save(1, state(1))
    flip(here / "step-1/state-00000.safetensors")
    with pytest.raises(DamagedCheckpointError, match=r"here/step-1/state-00000\.safetensors: it was changed"):
        DirectoryUpload(there)(here / "step-1")
    assert names_in(there) == []


def test_a_slow_one_holds_nothing_up(tmp_path):
    """Saves return, what is being uploaded stays, and of those that come meanwhile the newest is next."""
    gate = Gate()
    manager = CheckpointManager(tmp_path, keep_last=1, upload=gate)
    manager.save(1, state(1))
    assert gate.begun.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.save(2, state(2))
        assert manager.steps() == [1, 2]
    with pytest.warns(CheckpointWarning, match=r"step-2 is not uploaded: the next one came while .*step-1"):
        manager.save(3, state(3))
    assert manager.steps() == [1, 3]  # 2 need not wait any more
    gate.go.set()
    manager.close()
    assert gate.done == ["step-1", "step-3"]
    assert manager.steps() == [3]


def test_an_error_of_the_run_waits_for_it_too(tmp_path):
    gate = Gate()
    timer = threading.Timer(0.2, gate.go.set)
    with pytest.raises(KeyError, match="of the run"), CheckpointManager(tmp_path, upload=gate) as manager:  # noqa: PT012
        manager.save(1, state(1))
        timer.start()
        raise KeyError("of the run")
    assert gate.done == ["step-1"]


def test_the_same_step_again(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    with CheckpointManager(here, upload=DirectoryUpload(there)) as manager:
        for value in (1, 2):
            manager.save(5, state(value))
            manager._wait_for_uploads()
    assert restored(there) == (5, 2)
    assert names_in(there) == ["step-5"]


def test_how_many_stay_there(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    manager = CheckpointManager(here)
    for keep, steps in ((None, [8, 9, 10]), (2, [9, 10])):
        for step in (8, 9, 10):
            manager.save(step, state(step))
            DirectoryUpload(there / str(keep), keep_last=keep)(here / f"step-{step}")
        assert CheckpointManager(there / str(keep)).steps() == steps
    # A run that went back: what was just copied stays.
    manager.save(3, state(3))
    DirectoryUpload(there / "2", keep_last=2)(here / "step-3")
    assert CheckpointManager(there / "2").steps() == [3, 9, 10]


def test_copies_that_a_run_has_gone_back_behind_are_set_aside(tmp_path):
    """Also one that is still on its way."""
    here, there = tmp_path / "here", tmp_path / "there"
    with CheckpointManager(here, keep_last=1, upload=DirectoryUpload(there)) as manager:
        manager.save(20, state(20))
        manager._wait_for_uploads()
        manager.save(30, state(30))
        manager.rewind(25)
        assert names_in(here) == ["step-30.damaged"]
        assert names_in(there) == ["step-20", "step-30.damaged"]
        assert manager.restore(state(0)).step == 20


def test_the_storage_is_read_where_this_machine_has_nothing(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    with CheckpointManager(here, keep_last=1, upload=DirectoryUpload(there)) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
            manager._wait_for_uploads()
    again = CheckpointManager(tmp_path / "new machine", upload=DirectoryUpload(there))
    counts = {}
    found = again.restore({"counts": counts})
    assert (found.step, found.path, counts["value"]) == (2, there / "step-2", 2)
    assert not (tmp_path / "new machine").exists()
    # Of one step the nearer is taken, and the other if that is damaged.
    again = CheckpointManager(here, upload=DirectoryUpload(there))
    assert again.restore({"counts": counts}).path == here / "step-2"
    flip(here / "step-2/state-00000.safetensors")
    for step in (None, 2):
        with pytest.warns(CheckpointWarning, match="passed over: .*here/step-2"):
            found = again.restore({"counts": counts}, step)
        assert (found.path, found.damaged) == (there / "step-2", (here / "step-2",))
        (here / "step-2.damaged").rename(here / "step-2")
    assert again.restore({"counts": counts}, 1).path == there / "step-1"
    flip(there / "step-1/state-00000.safetensors")
    with pytest.raises(DamagedCheckpointError, match=r"there/step-1"):
        again.restore({"counts": counts}, 1)
    with pytest.raises(
        ValueError, match=r"^step: got 7; allowed: one of those in .*here and .*there: \[1, 2\]"
    ):
        again.restore({"counts": counts}, 7)


def test_killed_before_any_operation(tmp_path, killed_at):
    """The storage has the checkpoint before or the new one, whole; the next upload clears what is left."""
    manager = CheckpointManager(tmp_path / "run")
    manager.save(5, state(1))
    shutil.copytree(tmp_path / "run", tmp_path / "first")
    manager.save(5, state(2))
    outcomes, killed, count = [], True, 0
    while killed:
        count += 1
        there = tmp_path / f"there-{count}"
        DirectoryUpload(there)(tmp_path / "first/step-5")
        killed = killed_at(count, lambda there=there: DirectoryUpload(there)(tmp_path / "run/step-5"))
        outcomes.append(restored(there))
        DirectoryUpload(there)(tmp_path / "run/step-5")
        assert names_in(there) == ["step-5"]
        assert restored(there) == (5, 2)
    assert count > 10
    assert outcomes == sorted(outcomes) and {value for _, value in outcomes} == {1, 2}


def test_a_run_that_is_killed_while_it_uploads_goes_on(tmp_path, killed_at):
    """From the first copy, which was published before."""
    here, there = tmp_path / "here", tmp_path / "there"
    with CheckpointManager(here, upload=DirectoryUpload(there)) as manager:
        manager.save(1, state(1))

    def run():
        copy = DirectoryUpload(there)

        def dying(path):
            (there / f".step-2.{os.getpid()}").mkdir()
            copy(path)
            os.kill(os.getpid(), signal.SIGKILL)

        manager = CheckpointManager(here, upload=dying)
        manager.restore({})
        manager.save(2, state(2))
        manager.close()

    assert killed_at(0, run)
    again = CheckpointManager(here, upload=DirectoryUpload(there))
    assert again.restore({"counts": (counts := {})}).step == 2
    assert counts["value"] == 2
    again.save(3, state(3))
    again.close()
    assert names_in(there) == ["step-1", "step-2", "step-3"]


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda path: CheckpointManager(path, upload=3), r"^upload: got 3"),
        (lambda path: DirectoryUpload(path / "file"), r"^directory: got"),
        (lambda path: DirectoryUpload(path, keep_last=0), r"^keep_last: got 0"),
    ],
)
def test_refused(tmp_path, call, match):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=match):
        call(tmp_path)


def test_an_upload_is_a_value(tmp_path):
    assert DirectoryUpload(str(tmp_path), keep_last=2) == DirectoryUpload(Path(tmp_path), keep_last=2)

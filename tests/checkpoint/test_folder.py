"""Folders: whole or not there, whenever the process that writes one is killed; nothing else is believed."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stackwise.checkpoint import CheckpointManager, DamagedCheckpointError
from stackwise.checkpoint import folder as module
from stackwise.checkpoint.folder import (
    MANIFEST,
    Manifest,
    publish,
    recover,
    scratch_of,
    steps_in,
    verify_files,
)
from stackwise.checkpoint.tensor_file import FileEntry, write_bytes


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def made(folder, content=b"content", step=None):
    folder.mkdir(parents=True)
    entry = write_bytes(folder / "x", [content])
    number = int(folder.name.split("-")[1].split(".")[0]) if step is None else step
    Manifest(number, "0" * 32, 1, "now", 1, {}, None, {}, {"x": entry}).write(folder)
    return folder


def gone_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("step", [2, 1], ids=["a new step", "the same step"])
def test_killed_before_any_operation(tmp_path, step, killed_at):
    """At each of them: what is there is the state before, or the one after, and nothing is in the way."""
    killed, outcomes = True, []
    count = 0
    while killed:
        count += 1
        directory = tmp_path / str(count)
        state = {"w": torch.ones(3), "n": 1}
        CheckpointManager(directory, keep_last=1).save(1, {"state": state})

        def save(directory=directory):
            after = {"w": torch.full((3,), 2.0), "n": 2}
            manager = CheckpointManager(directory, keep_last=1)
            manager.restore({})
            manager.save(step, {"state": after})

        killed = killed_at(count, save)
        found = {}
        manager = CheckpointManager(directory, keep_last=1)
        restored = manager.restore({"state": found})
        assert restored.damaged == ()
        assert found["w"].tolist() == [float(found["n"])] * 3
        assert restored.step == (step if found["n"] == 2 else 1)
        outcomes.append(found["n"])
        for each in manager.steps():
            manager.verify(each)
        manager.save(3, {"state": state})
        assert names_in(directory) == ["step-3"]
    assert count > 15
    assert outcomes == sorted(outcomes)  # the old one up to some operation, the new one from there on
    assert outcomes[0] == 1 and outcomes[-1] == 2


def test_leftovers_of_living_processes_stay(tmp_path):
    living = os.getppid()
    for number in (gone_process(), os.getpid(), living):
        made(tmp_path / f".step-3.{number}")
        made(tmp_path / f".step-4.{number}.removed")
    others = [".step-5", ".step-x.1", ".step-5.0", "step-6.old", ".other.1", ".step-7.1.other"]
    for name in others:
        (tmp_path / name).mkdir()
    recover(tmp_path, clear=False)
    assert len(names_in(tmp_path)) == 6 + len(others)
    recover(tmp_path, clear=True)
    assert sorted(names_in(tmp_path)) == sorted([*others, f".step-3.{living}", f".step-4.{living}.removed"])
    recover(tmp_path / "none", clear=True)


def test_interrupted_replacement_gets_its_name_back(tmp_path):
    for step, number in ((3, gone_process()), (4, os.getppid())):
        made(tmp_path / f".step-{step}.{number}.old", b"old")
    recover(tmp_path, clear=False)
    assert steps_in(tmp_path) == [3, 4]
    made(tmp_path / f".step-3.{gone_process()}.old", b"older")
    recover(tmp_path, clear=True)
    assert names_in(tmp_path) == ["step-3", "step-4"]
    assert (tmp_path / "step-3/x").read_bytes() == b"old"


@pytest.mark.parametrize("number", ["0", "-1", "9" * 30, "1x"])
def test_numbers_that_are_no_process(tmp_path, number):
    (tmp_path / f".step-1.{number}").mkdir()
    recover(tmp_path, clear=True)
    assert len(names_in(tmp_path)) == (number != "9" * 30)


def test_publish_puts_back_what_it_could_not_replace(tmp_path, monkeypatch):
    scratch, target = made(tmp_path / ".step-1.7", b"new"), made(tmp_path / "step-1", b"old")
    rename, calls = os.rename, []

    def second_fails(*given):
        calls.append(given)
        if len(calls) == 2:
            raise OSError("no")
        rename(*given)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(OSError, match="no"):
        publish(scratch, target, "0" * 32)
    assert (target / "x").read_bytes() == b"old"
    monkeypatch.undo()
    publish(scratch, target, "0" * 32)
    assert (target / "x").read_bytes() == b"new"
    assert names_in(tmp_path) == ["step-1"]


def test_everything_is_flushed_before_it_is_named(tmp_path, monkeypatch):
    """In the order that a power cut asks for: files, folders, the name, the folder of the name."""
    events, held = [], {}
    fsync, rename, open_ = os.fsync, os.rename, os.open

    def opened(path, *given, **options):
        descriptor = open_(path, *given, **options)
        held[descriptor] = Path(path).name
        return descriptor

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", lambda d: (events.append(held.get(d, "?")), fsync(d)))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    (tmp_path / "run").mkdir()
    CheckpointManager(tmp_path / "run").save(
        1, {"m": torch.nn.Linear(1, 1)}, files={"a.txt": lambda p: p.touch()}
    )
    renamed = events.index("rename")
    files = {
        "a.txt",
        "state-00000.json",
        "state-00000.safetensors",
        "rank-00000.safetensors",
        MANIFEST,
    }
    scratch = scratch_of(tmp_path, 1).name
    assert set(events[:renamed]) == {*files, "tensors", scratch}
    assert events[renamed - 1] == scratch
    assert events.index(MANIFEST) > max(events.index(name) for name in files - {MANIFEST})
    assert events[renamed + 1 :] == ["run"]


def rewritten(folder, **changes):
    """A manifest whose digest is right, and which nothing here writes."""
    content = json.loads((folder / MANIFEST).read_text())
    content.pop("digest")
    content.update(changes)
    content["digest"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


ENTRY = {"bytes": 7, "sha256": "0"}


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"step": 2}, "it is of step 2"),
        ({"step": "x"}, "it is of step 'x'"),
        ({"notes": {"x": {"$import": "os"}}}, "not understood"),
        ({"metric": {"$tensor": ["x", []]}}, "not understood"),
        ({"files": []}, "not understood"),
        ({"files": {"x": 3}}, "not understood"),
        ({"files": {"x": {**ENTRY, "more": 3}}}, "not understood"),
        ({"more": 1}, "not understood"),
        ({"files": {"../x": ENTRY}}, "lists the file"),
        ({"files": {"/etc/passwd": ENTRY}}, "lists the file"),
        ({"files": {"tensors/../../x": ENTRY}}, "lists the file"),
        ({"files": {"a/x": ENTRY}}, "lists the file"),
        ({"files": {"a\\x": ENTRY}}, "lists the file"),
        ({"files": {"": ENTRY}}, "lists the file"),
    ],
    ids=str,
)
def test_manifests_of_others(tmp_path, changes, match):
    folder = made(tmp_path / "step-1")
    rewritten(folder)
    Manifest.read(folder)
    rewritten(folder, **changes)
    with pytest.raises(DamagedCheckpointError, match=match):
        Manifest.read(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 10**6, b'{"format": 2}', b"1e999", b"9" * 10**5],
    ids=lambda content: repr(content[:9]),
)
def test_what_is_no_manifest(tmp_path, content):
    folder = made(tmp_path / "step-1")
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"step-1/manifest\.json: no list"):
        Manifest.read(folder)


def test_a_manifest_is_of_its_folder_and_of_some_size(tmp_path, monkeypatch):
    folder = made(tmp_path / "step-1")
    other = folder.rename(tmp_path / "step-2")
    with pytest.raises(DamagedCheckpointError, match=r"step-2.*it is of step 1"):
        Manifest.read(other)
    monkeypatch.setattr(module, "_MANIFEST_BYTES", 50)
    with pytest.raises(DamagedCheckpointError, match="allowed: up to 50"):
        Manifest.read(other)


def test_a_pipe_is_not_waited_for(tmp_path):
    folder = made(tmp_path / "step-1")
    (folder / "x").unlink()
    os.mkfifo(folder / "x")
    with pytest.raises(DamagedCheckpointError, match="x: no regular file"):
        verify_files(folder, {"x": FileEntry(0, "")})


def test_what_cannot_be_read_is_damaged(tmp_path, monkeypatch):
    folder = made(tmp_path / "step-1")
    files = Manifest.read(folder).files

    def failing(self, *given, **options):
        raise OSError(5, "bad sector")

    monkeypatch.setattr("pathlib.Path.open", failing)
    with pytest.raises(DamagedCheckpointError, match=r"x: cannot be read.*bad sector"):
        verify_files(folder, files)


def test_unknown_files_are_ignored(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"state": {"a": 1}})
    (tmp_path / "step-1/evil.pkl").write_bytes(b"cos\nsystem\n(S'touch /tmp/evil'\ntR.")
    (tmp_path / "step-1/tensors/rank-00009.safetensors").write_bytes(b"junk")
    found = {}
    manager.restore({"state": found})
    assert found == {"a": 1}

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
    nameless_in,
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


def test_what_living_processes_write_is_left_alone(tmp_path):
    living = f"{os.getppid()}-{module._mark(os.getppid())}"
    for number in (gone_process(), os.getppid(), living, os.getpid()):
        made(tmp_path / f".step-3.{number}")
        made(tmp_path / f".step-4.{number}.removed")
    others = [".step-5", ".step-x.1", ".step-5.0", "step-6.old", ".other.1", ".step-7.1.other"]
    for name in others:
        (tmp_path / name).mkdir()
    recover(tmp_path, clear=False)
    assert len(names_in(tmp_path)) == 8 + len(others)
    recover(tmp_path, clear=True)
    assert sorted(names_in(tmp_path)) == sorted([*others, f".step-3.{living}", f".step-4.{living}.removed"])
    recover(tmp_path / "none", clear=True)


def test_a_number_that_is_another_process_by_now(tmp_path):
    """In containers numbers come again: what is left by the one before is left over."""
    living = os.getppid()
    mark = module._mark(living)
    for name in (
        f".step-3.{living}-{mark}",
        f".step-4.{living}-{'0' * 12}",
        f".step-5.{living}-{'0' * 12}.old",
    ):
        made(tmp_path / name)
    made(tmp_path / f".step-6.{living}-{mark}.old")
    assert nameless_in(tmp_path) == [5, 6]
    recover(tmp_path, clear=True)
    assert names_in(tmp_path) == [f".step-3.{living}-{mark}", f".step-6.{living}-{mark}.old", "step-5"]
    assert nameless_in(tmp_path) == [6]


def test_a_process_that_nobody_has_asked_about_has_ended(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    made(tmp_path / f".step-3.{process.pid}-{module._mark(process.pid)}.old")
    recover(tmp_path, clear=True)
    assert steps_in(tmp_path) == []
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    recover(tmp_path, clear=True)
    assert steps_in(tmp_path) == [3]
    process.wait()


def test_where_the_system_has_no_marks_the_number_tells(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_mark", lambda number: None)
    assert scratch_of(tmp_path, 3).name == f".step-3.{os.getpid()}"
    made(tmp_path / f".step-3.{os.getppid()}-{'0' * 12}.old")
    made(tmp_path / f".step-4.{gone_process()}-{'0' * 12}.old")
    recover(tmp_path, clear=True)
    assert steps_in(tmp_path) == [4]


def test_what_was_being_replaced_gets_its_name_back(tmp_path):
    living = f".step-4.{os.getppid()}-{module._mark(os.getppid())}.old"
    made(tmp_path / f".step-3.{gone_process()}.old", b"old")
    made(tmp_path / living, b"old")
    recover(tmp_path, clear=False)
    assert steps_in(tmp_path) == [3]
    made(tmp_path / f".step-3.{gone_process()}.old", b"older")
    recover(tmp_path, clear=True)
    assert steps_in(tmp_path) == [3]
    assert (tmp_path / "step-3/x").read_bytes() == b"old"
    assert sorted(names_in(tmp_path)) == [living, "step-3"]


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
        "run.txt",
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
        ({"format": 1}, "intact checkpoint of format 1"),
        ({"step": 2}, "it is of step 2"),
        ({"step": True}, "it is of step True"),
        ({"step": "1"}, "it is of step '1'"),
        ({"step": 10**400}, "it is of step 1"),
        ({"world_size": 0}, "world_size: got 0"),
        ({"world_size": 2**63}, "world_size: got 9"),
        ({"run": 3}, "run: got 3"),
        ({"run": "0" * 31}, "run: got '0"),
        ({"order": 1.0}, "order: got 1.0"),
        ({"time": None}, "time: got None"),
        ({"versions": ["torch"]}, "versions: got"),
        ({"versions": {"torch": 2}}, "versions: got"),
        ({"metric": "low"}, "metric"),
        ({"metric": {"$tensor": ["x", []]}}, "not understood"),
        ({"notes": [1]}, "notes"),
        ({"notes": {"x": {"$import": "os"}}}, "not understood"),
        ({"files": []}, "no list"),
        ({"files": {"x": 3}}, "no list"),
        ({"files": {"x": {**ENTRY, "bytes": -1}}}, "no size"),
        ({"files": {"x": {**ENTRY, "sha256": 3}}}, "no size"),
        ({"files": {"x": {**ENTRY, "more": 3}}}, "no list"),
        ({"files": {"../x": ENTRY}}, "lists the file"),
        ({"files": {"/etc/passwd": ENTRY}}, "lists the file"),
        ({"files": {"tensors/../../x": ENTRY}}, "lists the file"),
        ({"files": {"a/x": ENTRY}}, "lists the file"),
        ({"files": {"a\\x": ENTRY}}, "lists the file"),
        ({"files": {"": ENTRY}}, "lists the file"),
        ({"files": {MANIFEST: ENTRY}}, "lists the file"),
        ({"files": {"x.pt": ENTRY}}, r"x\.pt: a pickle"),
        ({"files": {"x.PKL": ENTRY}}, r"x\.PKL: a pickle"),
    ],
    ids=str,
)
def test_manifests_of_others(tmp_path, changes, match):
    folder = made(tmp_path / "step-1")
    Manifest.read(folder)
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

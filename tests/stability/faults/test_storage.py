"""Storage fails as it would: with the errors, and the files, that a full disk and a crash leave."""

import builtins
import errno
import io
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stackwise.stability.faults import BitRot, DiskFull, NanInjection, ShortWrite, broken
from stackwise.stability.faults.file_operations import intercepted
from tests.stability.faults.conftest import Training, hooks_of


def by_open(path, data):
    with open(path, "wb") as file:  # noqa: PTH123
        file.write(data)


def by_text(path, data):
    path.write_text(data.decode())


def by_path(path, data):
    path.write_bytes(data)


def by_os(path, data):
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def by_thread(path, data):
    errors = []

    def write():
        try:
            by_os(path, data)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def by_copy(path, data):
    with tempfile.NamedTemporaryFile() as source:
        source.write(data)
        source.flush()
        shutil.copy(source.name, path)


WAYS = [by_open, by_text, by_path, by_os, by_thread, by_copy]
DATA = b"0123456789" * 30


def system_calls():
    names = ("open", "write", "fsync", "rename", "replace")
    return (builtins.open, io.open, *(getattr(os, name) for name in names))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("after", [0, 1, 250, 299])
def test_a_full_disk(tmp_path, way, after):
    before, acted = system_calls(), []
    with DiskFull(step=0, folder=tmp_path / "full", after=after).around_saves(lambda: acted.append(1)):
        (tmp_path / "full").mkdir()
        way(tmp_path / "beside", DATA)
        with pytest.raises(OSError, match="No space left on device") as raised:
            way(tmp_path / "full" / "file", DATA)
    assert raised.value.errno == errno.ENOSPC
    assert acted
    assert (tmp_path / "beside").read_bytes() == DATA
    assert (tmp_path / "full" / "file").read_bytes() == DATA[:after], "what fits is there"
    assert system_calls() == before
    way(tmp_path / "full" / "file", DATA)
    assert (tmp_path / "full" / "file").read_bytes() == DATA


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_fits_is_written(tmp_path, way):
    def never():
        raise AssertionError("it did not act")

    with DiskFull(step=0, folder=tmp_path, after=len(DATA)).around_saves(never):
        way(tmp_path / "file", DATA)
    assert (tmp_path / "file").read_bytes() == DATA


def test_a_write_that_fits_in_part_says_so_and_the_next_one_fails(tmp_path):
    descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    with DiskFull(step=0, folder=tmp_path, after=4).around_saves(lambda: None):
        assert os.write(descriptor, b"123456") == 4
        with pytest.raises(OSError, match="No space"):
            os.write(descriptor, b"56")
    os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b"1234"


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_folder_behind_a_link(tmp_path, way):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    full = DiskFull(step=0, folder=tmp_path / "link", after=4).around_saves(lambda: None)
    with full, pytest.raises(OSError, match="No space"):
        way(tmp_path / "link" / "file", DATA)
    assert (tmp_path / "real" / "file").read_bytes() == DATA[:4]


def test_a_copied_folder(tmp_path):
    """Of more than is copied at once."""
    (tmp_path / "from").mkdir()
    for name in "ab":
        (tmp_path / "from" / name).write_bytes(os.urandom(3_000_000))
    with DiskFull(step=0, folder=tmp_path / "to", after=4_000_000).around_saves(lambda: None):
        with pytest.raises(shutil.Error, match="No space left on device"):
            shutil.copytree(tmp_path / "from", tmp_path / "to")
        # What one reader wrote into its error is not in that of the next.
        with pytest.raises(OSError, match="No space") as raised:
            by_path(tmp_path / "to" / "c", DATA)
    assert raised.value.filename == os.fspath(tmp_path / "to")
    sizes = sorted((tmp_path / "to" / name).stat().st_size for name in "ab")
    assert sizes == [1_000_000, 3_000_000]
    for name in "ab":
        found = (tmp_path / "to" / name).read_bytes()
        assert (tmp_path / "from" / name).read_bytes().startswith(found)


def test_copies_that_a_system_makes_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "_HAS_FCOPYFILE", True, raising=False)  # as on macOS
    with DiskFull(step=0, folder=tmp_path).around_saves(lambda: None):
        assert not shutil._HAS_FCOPYFILE
    assert shutil._HAS_FCOPYFILE


def test_the_space_is_that_of_all_files(tmp_path):
    with DiskFull(step=0, folder=tmp_path, after=400).around_saves(lambda: None):
        by_path(tmp_path / "first", DATA)
        with pytest.raises(OSError, match="No space"):
            by_path(tmp_path / "second", DATA)
        with pytest.raises(OSError, match="No space"):
            by_path(tmp_path / "third", b"1")
    assert [(tmp_path / name).stat().st_size for name in ("first", "second", "third")] == [300, 100, 0]


def test_safetensors_on_a_full_disk(tmp_path):
    tensors = {"a": torch.arange(1000.0)}
    full = DiskFull(step=0, folder=tmp_path, after=100).around_saves(lambda: None)
    with full, pytest.raises(SafetensorError) as raised:
        save_file(tensors, tmp_path / "model.safetensors")
    # What it raises where the device is really full, seen on a file system of 64 KiB.
    real = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert str(raised.value) == real
    assert (tmp_path / "model.safetensors").stat().st_size == 100
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], tensors["a"])


@pytest.mark.parametrize("after", [0, 100, 5000, 399_000])
def test_torch_save_on_a_full_disk(tmp_path, after):
    tensors, path, acted = {"a": torch.arange(100_000.0)}, tmp_path / "weights.pt", []
    before = torch.serialization._open_zipfile_writer_file
    full = DiskFull(step=0, folder=tmp_path, after=after).around_saves(lambda: acted.append(1))
    # What it raises where the device is really full, seen on a file system of 64 KiB and on /dev/full.
    real = r"^\[enforce fail at inline_container\.cc:\d+\] \. unexpected pos \d+ vs \d+$|iostream error$"
    with full, pytest.raises(RuntimeError, match=real):
        torch.save(tensors, path)
    assert acted
    assert path.stat().st_size == after
    assert torch.serialization._open_zipfile_writer_file is before
    torch.save(tensors, path)
    assert torch.equal(torch.load(path)["a"], tensors["a"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_torch_save_says_the_same_of_a_device_that_is_full(tmp_path):
    said = []
    with DiskFull(step=0, folder=tmp_path, after=0).around_saves(lambda: None):
        for path in ("/dev/full", tmp_path / "a"):
            with pytest.raises(RuntimeError) as raised:
                torch.save(torch.zeros(3), path)
            said.append(str(raised.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("after", [0, 5, 700, 3000])
def test_a_short_write_of_torch_save(tmp_path, after):
    acted = []
    with ShortWrite(step=0, folder=tmp_path, after=after).around_saves(lambda: acted.append(1)):
        torch.save(torch.zeros(1000), tmp_path / "a.pt")
        torch.save(torch.ones(1000), tmp_path.parent / "beside.pt")
    assert acted
    assert (tmp_path / "a.pt").stat().st_size == after
    with pytest.raises((RuntimeError, EOFError, UnpicklingError)):
        torch.load(tmp_path / "a.pt")
    assert torch.load(tmp_path.parent / "beside.pt").sum() == 1000


def test_what_torch_save_writes_is_whole_where_nothing_is_lost(tmp_path):
    state = {"a": torch.randn(7, 3), "b": [1, "x"], "c": torch.zeros(2, dtype=torch.bfloat16)}
    with ShortWrite(step=0, folder=tmp_path, after=10**6).around_saves(lambda: None):
        for path in (tmp_path / "a.pt", str(tmp_path / "ä.pt")):
            torch.save(state, path)
        with (tmp_path / "c.pt").open("wb") as file:
            torch.save(state, file)
    for path in sorted(tmp_path.iterdir()):
        loaded = torch.load(path)
        assert torch.equal(loaded["a"], state["a"])
        assert (loaded["b"], loaded["c"].dtype) == (state["b"], torch.bfloat16)
    assert len(list(tmp_path.iterdir())) == 3


def test_the_weights_of_a_training_that_are_saved_beside_a_small_file(subjects, tmp_path):
    training = Training(subjects.tiny())

    def save(step):
        (tmp_path / f"{step}.json").write_text("12345")
        torch.save(training.model.state_dict(), tmp_path / f"{step}.pt")

    training.before = save
    with broken(training.model, [ShortWrite(step=1, folder=tmp_path, target="*.pt", after=50)]) as injection:
        training.run(4)
    assert injection.fired == [1]
    sizes = [(tmp_path / f"{step}.pt").stat().st_size for step in range(4)]
    assert sizes[2] == 50
    assert min(sizes[0], sizes[1], sizes[3]) > 10_000
    assert {(tmp_path / f"{step}.json").stat().st_size for step in range(4)} == {5}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("after", [0, 7, 299])
def test_a_short_write_raises_nothing(tmp_path, way, after):
    acted = []
    with ShortWrite(step=0, folder=tmp_path, target="*.bin", after=after).around_saves(
        lambda: acted.append(1)
    ):
        way(tmp_path / "file.bin", DATA)
        way(tmp_path / "file.txt", DATA)
    assert acted
    assert (tmp_path / "file.bin").read_bytes() == DATA[:after]
    assert (tmp_path / "file.txt").read_bytes() == DATA


def test_a_short_write_of_safetensors(tmp_path):
    with ShortWrite(step=0, folder=tmp_path, after=60).around_saves(lambda: None):
        save_file({"a": torch.zeros(100)}, tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").stat().st_size == 60
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "a.safetensors")


def test_operations_are_seen_in_order(tmp_path):
    seen = []

    def decide(operation):
        seen.append((operation.kind, operation.path.name, operation.size))
        return operation.size

    with intercepted(tmp_path, "*", decide, None):
        with (tmp_path / "a").open("w") as file:
            json.dump([1], file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp_path / "a", tmp_path / "b")  # noqa: PTH105
        (tmp_path / "b").rename(tmp_path / "c")
        (tmp_path / "c").read_text()
        by_os(tmp_path / "d", b"12")
        np.save(tmp_path / "e.npy", np.zeros(1))
    assert seen[0] == ("open", "a", 0)
    assert sum(size for kind, name, size in seen if name == "a" and kind == "write") == 3
    rest = [entry for entry in seen if entry[0] != "write"]
    assert rest[:4] == [("open", "a", 0), ("sync", "a", 0), ("rename", "a", 0), ("rename", "b", 0)]
    assert rest[4:6] == [("open", "d", 0), ("sync", "d", 0)]
    assert ("write", "d", 2) in seen
    assert not [entry for entry in seen if entry[1] == "c"], "reading is nobody's concern"
    assert (tmp_path / "c").read_text() == "[1]"


@given(st.integers(0, 10_000), st.sampled_from(["flip", "truncate"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_rot_changes_one_byte(tmp_path, seed, kind):
    contents = {"a": b"\x00" * 5, "deep/b": bytes(range(40)), "empty": b""}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    path, offset = BitRot(step=0, folder=tmp_path, kind=kind, seed=seed).strike()
    name = path.relative_to(tmp_path).as_posix()
    for other, content in contents.items():
        if other != name:
            assert (tmp_path / other).read_bytes() == content
    after = path.read_bytes()
    if kind == "truncate":
        assert after == contents[name][:offset]
        assert offset < len(contents[name])
    else:
        bits = [a ^ b for a, b in zip(after, contents[name], strict=True)]
        assert [bin(x).count("1") for x in bits] == [int(i == offset) for i in range(len(bits))]


def test_rot_reaches_every_byte_and_keeps_to_its_target(tmp_path):
    (tmp_path / "a").write_bytes(b"\x00" * 3)
    (tmp_path / "b").write_bytes(b"\x00" * 2)
    found = {BitRot(step=0, folder=tmp_path, seed=seed).strike() for seed in range(100)}
    assert found == {(tmp_path / "a", i) for i in range(3)} | {(tmp_path / "b", i) for i in range(2)}
    assert {BitRot(step=0, folder=tmp_path, target="b", seed=s).strike()[0] for s in range(9)} == {
        tmp_path / "b"
    }


@pytest.mark.parametrize("content", [None, b""])
def test_rot_without_a_file(tmp_path, content):
    if content is not None:
        (tmp_path / "empty").write_bytes(content)
    with pytest.raises(ValueError, match=r"bit_rot: target: got '.*', which matches no file with content"):
        BitRot(step=0, folder=tmp_path).strike()


def test_saves_behind_the_steps_of_a_training(subjects, tmp_path):
    training = Training(subjects.tiny())
    written, errors = [], []

    def save(step):
        """What was there before the step: the first is none of a step."""
        try:
            (tmp_path / f"{step}").write_bytes(b"12345")
        except OSError as error:
            errors.append(error.errno)
        written.append((tmp_path / f"{step}").stat().st_size)

    training.before = save
    before = system_calls()
    faults = [DiskFull(step=1, duration=2, folder=tmp_path, after=3), NanInjection(step=3, target="loss")]
    with broken(training.model, faults) as injection:
        training.run(5)
        save(5)
    # After step 1 and after step 2.
    assert written == [5, 5, 3, 3, 5, 5]
    assert errors == [errno.ENOSPC] * 2
    assert injection.fired == [1, 2, 3]
    assert system_calls() == before
    assert not hooks_of(training.model)


def test_a_full_disk_that_nobody_writes_to(subjects, tmp_path):
    training = Training(subjects.tiny())
    before = system_calls()
    with (
        pytest.raises(ValueError, match=r"disk_full\(step=1.*: it did not act"),
        broken(training.model, [DiskFull(step=1, folder=tmp_path)]),
    ):
        training.run(3)
    assert system_calls() == before


def test_rot_as_a_step_begins(subjects, tmp_path):
    training = Training(subjects.tiny())
    (tmp_path / "file").write_bytes(bytes(100))
    sound = []
    training.before = lambda step: sound.append((tmp_path / "file").read_bytes() == bytes(100))
    with broken(training.model, [BitRot(step=1, folder=tmp_path)]) as injection:
        training.run(3)
    assert sound == [True, True, False]
    assert injection.fired == [1]


@pytest.mark.parametrize(
    "make, key",
    [
        (lambda: DiskFull(step=0, folder=""), "disk_full: folder"),
        (lambda: DiskFull(step=0, folder=3), "disk_full: folder"),
        (lambda: DiskFull(step=0, folder="a", after=-1), "disk_full: after"),
        (lambda: DiskFull(step=0, folder="a", target=""), "disk_full: target"),
        (lambda: ShortWrite(step=0, folder="a", after=0.5), "short_write: after"),
        (lambda: BitRot(step=0, folder="a", kind="rust"), "bit_rot: kind"),
        (lambda: BitRot(step=0, folder="a", seed=-1), "bit_rot: seed"),
    ],
)
def test_arguments_that_are_refused(make, key):
    with pytest.raises(ValueError, match=rf"^{key}: got .*; allowed: "):
        make()

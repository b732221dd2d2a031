"""Temporary folder: a process removes its own, and those that killed processes left."""

import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from stackwise.support.temporary_folder import temporary_folder

HOLDER = """
import sys
from stackwise.support.temporary_folder import temporary_folder
with temporary_folder("mine-") as folder:
    (folder / "tree").mkdir()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_folder_is_removed_at_the_end(place):
    with pytest.raises(KeyError), temporary_folder("mine-", place / "new") as folder:  # noqa: PT012
        (folder / "file").touch()
        assert folder.parent == place / "new" and folder.name.startswith("mine-")
        raise KeyError
    assert list(place.rglob("*")) == [place / "new"]


def test_folder_of_a_killed_process_is_removed_by_the_next(place):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        left = Path(holder.stdout.readline().strip())
        with temporary_folder("mine-"):
            assert (left / "tree").is_dir(), "its process lives"
        holder.kill()
    assert left.is_dir()
    with temporary_folder("mine-") as folder:
        assert list(place.iterdir()) == [folder]


def test_folder_is_not_removed_before_it_is_locked(monkeypatch):
    acquire, is_first = FileLock.acquire, iter([True])

    def late(self, *arguments, **options):
        if next(is_first, False):
            with temporary_folder("mine-"):
                pass
        return acquire(self, *arguments, **options)

    monkeypatch.setattr(FileLock, "acquire", late)
    with temporary_folder("mine-") as folder:
        assert folder.is_dir()


def test_folders_without_a_lock_or_with_another_prefix_remain(place):
    others = {place / "mine-without", place / "mine", place / "other-locked"}
    for folder in others:
        folder.mkdir()
    (place / "other-locked" / ".lock").touch()
    with temporary_folder("mine-"):
        pass
    assert set(place.iterdir()) == others


def test_folder_of_a_file_system_without_locks_is_removed_by_its_process(place, monkeypatch):
    def no_locks(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with temporary_folder("mine-") as folder, temporary_folder("mine-"):
        assert folder.is_dir()
    assert list(place.iterdir()) == []

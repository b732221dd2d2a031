"""Temporary folders: what a killed run leaves, the next one removes."""

import fcntl
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stackwise.gate.temporary_folder import PREFIX, temporary_folder
from tests.forked import HANG_SECONDS

HOLDER = """
import sys
from stackwise.gate.temporary_folder import temporary_folder
with temporary_folder() as folder:
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
    with pytest.raises(KeyError), temporary_folder() as folder:  # noqa: PT012
        (folder / "file").touch()
        assert folder.parent == place
        raise KeyError
    assert not list(place.iterdir())


def test_folder_of_a_killed_run_is_removed_by_the_next(place):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    left = Path(holder.stdout.readline().strip())
    with temporary_folder():
        assert (left / "tree").is_dir(), "its run lives"
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=HANG_SECONDS)
    assert left.is_dir()
    with temporary_folder() as folder:
        assert list(place.iterdir()) == [folder]


def test_folder_is_not_removed_by_a_run_that_begins_before_it_is_locked(place, monkeypatch):
    lock, is_first = fcntl.flock, iter([True])

    def flock(file, how):
        if next(is_first, False):
            with temporary_folder():
                pass
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with temporary_folder() as folder:
        assert folder.is_dir()


def test_folders_of_others_are_left_alone(place):
    for name in (f"{PREFIX}without-a-lock", "other"):
        (place / name).mkdir()
    with temporary_folder():
        pass
    assert {path.name for path in place.iterdir()} == {f"{PREFIX}without-a-lock", "other"}

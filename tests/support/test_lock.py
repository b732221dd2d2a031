"""Lock: one holder at a time, in one process or in several."""

import os
import subprocess
import sys

import pytest
from filelock import Timeout

from stackwise.support.lock import file_lock

HOLDER = """
import sys
from pathlib import Path
from stackwise.support.lock import file_lock
with file_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new folder" / "lock"


def assert_held(path):
    with pytest.raises(Timeout), file_lock(path, blocking=False):
        pass


def assert_free(path):
    with file_lock(path, blocking=False):
        pass


def test_lock_excludes_others_of_the_same_process_until_released(path):
    with file_lock(path) as held, held:
        assert_held(path)
    assert_free(path)


def test_lock_of_a_killed_process_is_free(path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert_held(path)
        holder.kill()
    assert_free(path)


def test_lock_is_not_inherited_by_a_forked_child(path):
    end, other_end = os.pipe()
    with file_lock(path):
        child = os.fork()
        if child == 0:
            os.close(other_end)
            os.read(end, 1)  # until the parent closes its end
            os._exit(0)
    assert_free(path)
    os.close(other_end)
    assert os.waitpid(child, 0)[1] == 0
    os.close(end)


def test_lock_refuses_a_file_system_without_locks(path, monkeypatch):
    def no_locks(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(OSError, match="Function not implemented"), file_lock(path):
        pass

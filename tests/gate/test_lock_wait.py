"""The file whose lock a process waits for."""

import fcntl
import subprocess
import sys
import time

import pytest

from stackwise.gate.process import awaited_lock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell who waits")
WAIT = "import fcntl, sys\nfile = open(sys.argv[1])\nprint(flush=True)\n{}"


@pytest.mark.parametrize("how", ["flock", "lockf"])
def test_the_file_is_named_while_a_process_of_the_session_waits(how, tmp_path):
    path = tmp_path / "lock"
    lock = f"file = open(sys.argv[1], 'r+'); fcntl.{how}(file, fcntl.LOCK_EX)"
    with path.open("w") as file:
        getattr(fcntl, how)(file, fcntl.LOCK_EX)
        command = [sys.executable, "-c", WAIT.format(lock), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
            while not (found := awaited_lock(process.pid)):
                time.sleep(0.01)
            process.kill()
    assert found == str(path)


def test_nothing_is_named_if_no_process_waits(tmp_path):
    (tmp_path / "lock").touch()
    command = [sys.executable, "-c", WAIT.format("sys.stdin.read()"), str(tmp_path / "lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        process.stdout.readline()
        assert awaited_lock(process.pid) == ""
        process.communicate()

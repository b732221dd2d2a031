"""The device of a run: one measures at a time, and each worker of xdist has one of its own."""

import os
import subprocess
import sys
import types

import pytest
import torch

from pytest_stackwise import device, options

HOLDER = """
import sys, types
from pytest_stackwise import device, options
options.device_name = lambda config: "cpu"
with device.lock(None):
    print("held", flush=True)
    sys.stdin.readline()
print("released", flush=True)
"""
FORKS = """
import os, time
from pytest_stackwise import device, options
options.device_name = lambda config: "cpu"
with device.lock(None):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
with device.lock(None, seconds=0):
    print("again")
os.kill(child, 9)
"""


@pytest.fixture
def on(monkeypatch, tmp_path):
    """A run on a device, whose locks nobody else knows: on(name)."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def choose(name, worker=None):
        monkeypatch.setattr(options, "device_name", lambda config: name)
        config = types.SimpleNamespace()
        if worker is not None:
            config.workerinput = {"workerid": worker}
        return config

    return choose


@pytest.fixture
def holder(on):
    """Another process that has the lock of the CPU."""
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process  # the end of its input is the end of its hold


def test_one_process_at_a_time(on, holder):
    config = on("cpu")
    with pytest.raises(TimeoutError) as error, device.lock(config, seconds=0):
        pass
    assert str(error.value).startswith(
        f"cpu: process {holder.pid} has been measuring there for more than 0 s; lock file: "
    )
    assert holder.communicate("\n")[0] == "released\n"
    with device.lock(config, seconds=0):
        pass


def test_who_ends_without_a_word_has_it_no_longer(on, holder):
    holder.kill()
    holder.wait()
    with device.lock(on("cpu"), seconds=0):
        pass


def test_a_child_that_lives_on_does_not_hold_it(on):
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True)
    assert done.stdout == "again\n"


def test_other_devices_are_free(on, holder):
    for name in ("cuda", "cuda:1"):
        with device.lock(on(name), seconds=0):
            pass


def test_entered_again_by_who_has_it(on, tmp_path):
    config = on("cpu")
    for _ in range(2):
        with device.lock(config, seconds=0):
            with device.lock(config, seconds=0):
                pass
            assert (tmp_path / f"stackwise-{os.getuid()}-cpu.lock").read_text() == str(os.getpid())
    assert device._held == {}


def test_an_error_inside_gives_it_back(on, tmp_path):
    config = on("cpu")
    with pytest.raises(ZeroDivisionError), device.lock(config):
        raise ZeroDivisionError
    assert device._held == {}


@pytest.mark.parametrize(
    "visible, name, file",
    [
        (None, "cuda", "cuda-0"),
        (None, "cuda:1", "cuda-1"),
        ("2,3", "cuda", "cuda-2"),
        ("2,3", "cuda:1", "cuda-3"),
        ("GPU-8f4c, 1", "cuda:0", "cuda-GPU-8f4c"),
        ("2,3", "cpu", "cpu"),
    ],
)
def test_the_lock_is_of_the_device_itself(on, monkeypatch, tmp_path, visible, name, file):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with device.lock(on(name)):
        assert (tmp_path / f"stackwise-{os.getuid()}-{file}.lock").exists()


@pytest.mark.parametrize(
    "worker, visible, left",
    [
        ("gw0", "2,3", "2"),
        ("gw1", "2,3", "3"),
        ("gw2", "2,3", "2"),
        ("gw11", "GPU-8f4c,5,7", "7"),
        ("gw1", None, "1"),
        ("gw3", None, "0"),
        ("gw1", "", ""),
    ],
)
def test_a_worker_takes_the_one_at_its_place(on, monkeypatch, worker, visible, left):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    device.take_a_device(on("cuda", worker))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left


@pytest.mark.parametrize(
    "name, worker, used",
    [("cpu", "gw1", False), ("cuda:1", "gw1", False), ("cuda", None, False), ("cuda", "gw1", True)],
    ids=["not asked for", "named", "no worker", "in use already"],
)
def test_what_is_left_alone(on, monkeypatch, name, worker, used):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    device.take_a_device(on(name, worker))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.slow
def test_workers_of_a_run(pytester, folder, run_apart, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    pytester.makeconftest(
        """
        import torch
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 2
        """
    )
    pytester.makepyfile(
        """
        import os, pathlib, pytest
        @pytest.mark.parametrize("number", range(8))
        def test_it(number):
            worker = os.environ["PYTEST_XDIST_WORKER"]
            pathlib.Path(worker).write_text(os.environ["CUDA_VISIBLE_DEVICES"])
        """
    )
    run_apart("--gpu", "-n", "2", "--dist", "each").assert_outcomes(passed=16)
    assert [(folder / worker).read_text() for worker in ("gw0", "gw1")] == ["5", "7"]

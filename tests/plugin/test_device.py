"""The device of a run: one measures at a time, and each worker of xdist has one of its own."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout

from pytest_stackwise import device
from stackwise.support.lock import file_lock

HOLDER = """
import sys
from pytest_stackwise import device
with device.lock("cpu"):
    print("held", flush=True)
    sys.stdin.readline()
print("released", flush=True)
"""


# Two processes that measure on one GPU, which each knows by another number, in turns as short as can be.
CONTENDS = """
import os, sys
from pytest_stackwise import device
device._uuid = lambda index: "8f4c"
name, file = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
for _ in range(200):
    with device.lock(name):
        for word in ("in", "out"):
            with open(file, "a") as out:
                out.write(f"{word} {os.getpid()}\\n")
"""


@pytest.fixture(autouse=True)
def _locks_of_this_test(monkeypatch, tmp_path):
    """Nobody else knows them."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


class Run:
    """A run's configuration, as far as a device is concerned."""

    def __init__(self, named=None, gpu=False):
        self.options = {"stackwise_device": named, "stackwise_gpu": gpu}
        self.stash, self.warnings = pytest.Stash(), []

    def getoption(self, name, default=None):
        return self.options.get(name, default)

    def getini(self, name):
        return None

    def issue_config_time_warning(self, warning, stacklevel):
        self.warnings.append(warning)


@pytest.fixture
def holder(_locks_of_this_test):
    """Another process that has the lock of the CPU."""
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process  # the end of its input is the end of its hold


def test_one_process_at_a_time(holder):
    with pytest.raises(TimeoutError) as error, device.lock("cpu", seconds=0):
        pass
    assert str(error.value).startswith(
        f"cpu: process {holder.pid} has been measuring there for more than 0 s; lock file: "
    )
    assert holder.communicate("\n")[0] == "released\n"
    with device.lock("cpu", seconds=0):
        pass


def test_the_time_is_that_of_one_hold(monkeypatch):
    """Others that take turns, each for less than that, have nobody give up."""
    acquire, others = FileLock.acquire, iter(["4711", "4712"])

    def contended(lock, *arguments, **options):
        for process in others:
            Path(lock.lock_file).write_text(process)
            raise Timeout(lock.lock_file)
        return acquire(lock, *arguments, **options)

    monkeypatch.setattr(FileLock, "acquire", contended)
    with device.lock("cpu", seconds=0):
        assert next(others, None) is None


def test_two_that_want_one_device_take_turns(tmp_path):
    order = tmp_path / "order"
    command = [sys.executable, "-c", CONTENDS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([*command, name, str(order)], **pipes) for name in ("cuda:0", "cuda:1")]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        process.communicate()
        assert process.returncode == 0
    lines = [line.split() for line in order.read_text().splitlines()]
    assert len(lines) == 2 * 2 * 200
    for came, went in zip(lines[::2], lines[1::2], strict=True):
        assert (came[0], went[0]) == ("in", "out")
        assert came[1] == went[1], "somebody else came in"
    turns = [came[1] for came in lines[::2]]
    assert {str(process.pid) for process in both} == set(turns)
    assert len(list(tmp_path.glob("stackwise-*.lock"))) == 1


def test_other_devices_are_free(holder):
    for name in ("cuda", "cuda:1"):
        with device.lock(name, seconds=0):
            pass


def test_entered_again_by_who_has_it(tmp_path):
    for _ in range(2):
        with device.lock("cpu", seconds=0):
            with device.lock("cpu", seconds=0):
                pass
            assert (tmp_path / f"stackwise-{os.getuid()}-cpu.lock").read_text() == str(os.getpid())


def test_an_error_inside_gives_it_back(tmp_path):
    with pytest.raises(ZeroDivisionError), device.lock("cpu"):
        raise ZeroDivisionError
    with file_lock(tmp_path / f"stackwise-{os.getuid()}-cpu.lock", blocking=False):
        pass


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
def test_the_lock_is_of_what_the_user_names_where_torch_tells_nothing(
    monkeypatch, tmp_path, visible, name, file
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with device.lock(name):
        assert (tmp_path / f"stackwise-{os.getuid()}-{file}.lock").exists()


def test_the_lock_is_of_the_device_itself(monkeypatch, tmp_path):
    """By its UUID, whatever numbers CUDA_VISIBLE_DEVICES makes of it here."""
    properties = {0: types.SimpleNamespace(uuid="8f4c"), 1: types.SimpleNamespace(uuid="aa01")}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    for name, uuid in (("cuda:0", "8f4c"), ("cuda:1", "aa01"), ("cuda", "aa01")):
        with device.lock(name):
            assert (tmp_path / f"stackwise-{os.getuid()}-cuda-{uuid}.lock").exists()
    assert device.same_device("cuda", "cuda:1")
    assert not device.same_device("cuda", "cuda:0")
    assert not device.same_device("cuda", "cpu")


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
def test_a_worker_takes_the_one_at_its_place(monkeypatch, worker, visible, left):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(device, "_cuda_has_begun", lambda: False)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    run = Run("cuda")
    device.take_a_device(run)
    device.take_a_device(run)  # again, once all is configured: it has its own already
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left
    assert run.warnings == []


@pytest.mark.parametrize(
    "run, worker, taken",
    [
        (Run(), "gw1", False),
        (Run("cpu", gpu=True), "gw1", False),
        (Run("cuda:1"), "gw1", False),
        (Run("cuda"), "", False),
        (Run("cuda"), "gw1", True),
        (Run("auto"), "gw1", True),
        (Run(gpu=True), "gw1", True),
    ],
    ids=["not asked for", "cpu", "by its number", "no worker", "cuda", "auto", "gpu"],
)
def test_who_takes_one(monkeypatch, run, worker, taken):
    """Nor is torch asked whether there is a device: CUDA begins with that, and has read the variable."""
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append(1) or True)
    monkeypatch.setattr(device, "_cuda_has_begun", lambda: False)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    device.take_a_device(run)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("3" if taken else "2,3")
    assert not asked


def test_where_cuda_has_begun_it_is_too_late_and_that_is_said(monkeypatch):
    monkeypatch.setattr(device, "_cuda_has_begun", lambda: True)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    run = Run("cuda")
    device.take_a_device(run)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    [warning] = run.warnings
    assert isinstance(warning, pytest.PytestConfigWarning)
    assert str(warning).startswith("gw1 shares its CUDA device with other workers: CUDA was in use before")


@pytest.mark.parametrize("status, begun", [(3, False), (0, True), (100, True)])
def test_when_cuda_has_begun(monkeypatch, status, begun):
    """The driver refuses every question before its cuInit, with CUDA_ERROR_NOT_INITIALIZED."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    driver = types.SimpleNamespace(cuDeviceGetCount=lambda count: status)
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: driver)
    assert device._cuda_has_begun() is begun
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert device._cuda_has_begun()


def test_without_a_driver_nothing_has_begun(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(device.ctypes, "CDLL", missing)
    assert not device._cuda_has_begun()


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

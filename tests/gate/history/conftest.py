"""A machine, and results that a history is filled with."""

import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest

from stackwise.gate.history.machine import Machine
from stackwise.gate.history.point import Result, Run
from stackwise.gate.history.reference import ReferenceTime
from tests.forked import HANG_SECONDS

WRITER = """
import sys, time
from pathlib import Path
from stackwise.gate.history import open_store
from stackwise.gate.history.machine import Machine
from stackwise.gate.history.point import Result, Run

place, name, ready, go = sys.argv[1:]
Path(ready).touch()
while not Path(go).exists():
    time.sleep(0.001)
with open_store(place) as store:
    for number in range(8):
        # In another order in each job: each could wait for the other's new tests.
        tests = [f"test {i}" for i in range(number + 1)][:: 1 if name == "a" else -1]
        run = Run(Machine.of({"cpu": "Some CPU"}), identity=f"{name} {number}")
        store.add(run, [Result(test, "time", 1.0, 0.0) for test in tests])
assert "torch" not in sys.modules
"""

START = datetime(2026, 1, 1, tzinfo=UTC)
FINGERPRINT = {
    "cpu": "Some CPU",
    "cpu_count": 4,
    "torch_threads": 2,
    "omp_wait_policy": "PASSIVE",
    "gpu": None,
    "system": "Linux x86_64",
    "python": "3.11.7",
    "torch": "2.13.0",
}


@pytest.fixture
def fingerprint():
    return dict(FINGERPRINT)


@pytest.fixture
def machine():
    return Machine.of(FINGERPRINT)


@pytest.fixture
def write_at_once(tmp_path):
    """Three jobs that put eight runs each into a store at the same time; none of them loads torch."""

    def write(place):
        go = tmp_path / "go"
        ready = {name: tmp_path / f"ready {name}" for name in "abc"}
        jobs = [
            subprocess.Popen([sys.executable, "-W", "error", "-c", WRITER, str(place), name, file, go])
            for name, file in ready.items()
        ]
        try:
            while not all(file.exists() for file in ready.values()):
                assert all(job.poll() is None for job in jobs)
                time.sleep(0.01)
            go.touch()
            assert [job.wait(HANG_SECONDS) for job in jobs] == [0, 0, 0]
        finally:
            for job in jobs:
                job.kill()
                job.wait()

    return write


@pytest.fixture
def make_run(machine):
    """The run of day `number`."""

    def make(number=0, branch="main", **given):
        given = {"machine": machine, "created": START + timedelta(days=number), **given}
        return Run(commit=f"{number:04x}" * 10, branch=branch, identity=f"{branch} {number}", **given)

    return make


@pytest.fixture
def make_result():
    """A result of one test, whose log-ratio is `value`."""

    def make(value=0.0, *, test="bench/test_a.py::test_step", metric="time", reference=True, **given):
        time = ReferenceTime(1e-3, 4e-3) if reference is True else reference or None
        return Result(test, metric, 0.01, value, time, **given)

    return make

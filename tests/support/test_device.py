"""Devices by name, threads, freed memory, and a fingerprint that two runs on one machine share."""

import ctypes
import json
import os
import platform
import re
import time
import types
from pathlib import Path

import pytest
import torch

from stackwise.support import device as module
from stackwise.support.device import (
    fingerprint,
    keep_freed_memory,
    release_freed_memory,
    resolve_device,
    threads_for,
)
from tests.forked import printed

CPUINFO = Path("/proc/cpuinfo")
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


def pretend(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    "count, name, device",
    [
        *((count, "cpu", "cpu") for count in (0, 1, 3)),
        *[(0, "auto", "cpu"), (1, "auto", "cuda"), (3, "auto", "cuda")],
        *[(1, "cuda", "cuda"), (1, "cuda:0", "cuda:0"), (3, "cuda:2", "cuda:2")],
    ],
)
def test_device_is_resolved_by_its_name(monkeypatch, count, name, device):
    pretend(monkeypatch, count)
    assert resolve_device(name) == torch.device(device)


@pytest.mark.parametrize("count, name", [(0, "cuda"), (0, "cuda:0"), (1, "cuda:1"), (3, "cuda:3")])
def test_device_that_the_machine_lacks_is_refused(monkeypatch, count, name):
    pretend(monkeypatch, count)
    allowed = f"cuda:0 to cuda:{count - 1}" if count else "cpu, because this machine has no CUDA device"
    with pytest.raises(ValueError, match=f"device: got '{name}'; allowed: {allowed}"):
        resolve_device(name)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("name", ["", "gpu", "CPU", "cuda:x", "cuda:-1", "meta", "mps", "cuda,cpu", "cuda:"])
def test_device_of_another_name_is_refused(monkeypatch, name, count):
    pretend(monkeypatch, count)
    with pytest.raises(ValueError, match=f"device: got '{name}'; allowed: auto, cpu, cuda, cuda:N"):
        resolve_device(name)


@pytest.mark.parametrize("n_parameters, threads", [(0, 1), (999_999, 1), (1_000_000, 2)])
def test_tiny_model_has_one_thread(n_parameters, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads_for(n_parameters):
            inside = torch.get_num_threads()
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert (inside, after) == (threads, 2)


class TestFingerprint:
    def test_has_fixed_properties_of_the_machine(self):
        found = fingerprint()
        assert found == {
            "cpu": found["cpu"],
            "cpu_count": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
            "gpu": found["gpu"],
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        assert (found["gpu"] is None) == (not torch.cuda.is_available())
        assert json.loads(json.dumps(found)) == found

    @pytest.mark.skipif(not CPUINFO.exists(), reason="needs /proc/cpuinfo")
    def test_names_the_processor(self):
        # /proc/cpuinfo also has the clock rate, which changes.
        named = re.search(r"^model name\s*:\s*(.*?)\s*$", CPUINFO.read_text(), re.MULTILINE)
        expected = named[1] if named else platform.processor() or platform.machine()
        assert fingerprint()["cpu"] == expected != ""

    def test_does_not_change_with_the_load(self):
        first = fingerprint()
        end = time.perf_counter() + 0.05
        while time.perf_counter() < end:
            torch.rand(100, 100) @ torch.rand(100, 100)
        assert fingerprint() == first

    def test_changes_with_the_settings_of_a_measurement(self, monkeypatch):
        before, threads = fingerprint(), torch.get_num_threads()
        monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE_OF_THIS_TEST")
        torch.set_num_threads(threads + 1)
        try:
            after = fingerprint()
        finally:
            torch.set_num_threads(threads)
        assert {key for key in before if before[key] != after[key]} == {"omp_wait_policy", "torch_threads"}


class TestFingerprintOfGpu:
    @pytest.fixture(autouse=True)
    def driver_file(self, monkeypatch, tmp_path):
        """Pretend two GPUs of different kinds. The second is current. Return the driver's file in /proc."""
        kinds = [
            types.SimpleNamespace(name="A", total_memory=10, major=8, minor=0),
            types.SimpleNamespace(name="B", total_memory=20, major=9, minor=0),
        ]
        pretend(monkeypatch, 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: kinds[device.index])
        monkeypatch.setattr(module, "_DRIVER", tmp_path / "version")
        return tmp_path / "version"

    @pytest.mark.parametrize(
        "device, name, capability",
        [("cuda:0", "A", "8.0"), *((device, "B", "9.0") for device in ("cuda:1", "cuda", "cpu", None))],
    )
    def test_describes_the_gpu_of_the_measurement(self, device, name, capability):
        found = fingerprint(device)["gpu"]
        assert (found["name"], found["capability"]) == (name, capability)

    @pytest.mark.parametrize(
        "text",
        [
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC 12",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (dvs)",
        ],
        ids=["closed", "open"],
    )
    def test_has_the_version_of_the_driver(self, driver_file, text):
        driver_file.write_text(text + "\n")
        assert fingerprint()["gpu"]["driver"] == "550.54.15"

    def test_has_no_driver_version_if_it_is_unknown(self, monkeypatch):
        def missing(name):
            raise OSError

        monkeypatch.setattr(ctypes, "CDLL", missing)
        assert fingerprint()["gpu"]["driver"] is None


# By default, a block of more than 32 MiB is returned to the system, and allocated as new pages.
FAULTS = """
import resource, torch
from stackwise.support.device import keep_freed_memory
for keep in (False, True):
    kept = keep and keep_freed_memory()
    for times in (20, 10):  # to a steady state, and in it
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(times):
            torch.ones(64 << 20, dtype=torch.uint8)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    print(kept, faults * resource.getpagesize())
"""
# Of 32 blocks below 32 MiB every other one is freed, which leaves gaps.
GAPS = """
import resource, sys, torch
from pathlib import Path
from stackwise.support.device import keep_freed_memory
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20
torch.ones(30 << 20, dtype=torch.uint8)  # by itself, glibc maps no smaller ones from now on
assert not sys.argv[1:] or keep_freed_memory(sys.argv[1] == "keep")
before = resident()
blocks = [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(32)]
del blocks[::2]
print(resident() - before)
"""


class TestFreedMemory:
    @needs_glibc
    def test_that_is_kept_needs_no_new_pages(self):
        before, after = (line.split() for line in printed(FAULTS).splitlines())
        assert (before[0], after[0]) == ("False", "True")
        assert int(before[1]) >= 10 * (64 << 20)
        assert int(after[1]) < 1 << 20

    @needs_glibc
    def test_that_is_not_kept_leaves_no_gaps(self):
        assert 16 * 8 - 4 < int(printed(GAPS, "give back")) < 16 * 8 + 4
        assert int(printed(GAPS)) > 31 * 8 and int(printed(GAPS, "keep")) > 31 * 8

    def test_is_unchanged_by_another_allocator_than_glibc(self, monkeypatch):
        monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
        assert not (keep_freed_memory(True) or keep_freed_memory(False) or release_freed_memory())

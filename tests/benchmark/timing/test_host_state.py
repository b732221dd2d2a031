"""What is read of the host, from files and variables that the test writes."""

import json
import os

import pytest
import torch

from stackwise.benchmark.timing import host_state as module
from stackwise.benchmark.timing.host_state import HostState, host_state


@pytest.fixture
def cpus(monkeypatch, tmp_path):
    """Processors with these governors and clocks in kHz."""

    def write(*each):
        for number, (governor, clock) in enumerate(each):
            folder = tmp_path / f"cpu{number}" / "cpufreq"
            folder.mkdir(parents=True)
            (folder / "scaling_governor").write_text(governor + "\n")
            (folder / "scaling_cur_freq").write_text(f"{clock}\n")
        (tmp_path / "cpufreq").mkdir()
        (tmp_path / "cpuidle").mkdir()
        monkeypatch.setattr(module, "_CPUS", tmp_path)

    return write


def test_clocks_and_their_governor(cpus):
    cpus(("performance", 3_000_000), ("performance", 2_000_000))
    state = host_state()
    assert (state.governor, state.frequency_mhz) == ("performance", 2500.0)


def test_several_governors(cpus):
    cpus(("powersave", 1_000_000), ("performance", 2_000_000))
    assert host_state().governor == "performance,powersave"


def test_a_virtual_machine_tells_neither(cpus):
    cpus()
    state = host_state()
    assert (state.governor, state.frequency_mhz) == (None, None)


@pytest.mark.parametrize("policy", ["PASSIVE", "active", None])
@pytest.mark.parametrize("threads", ["3", None])
def test_environment(monkeypatch, policy, threads):
    for name, value in (("OMP_WAIT_POLICY", policy), ("OMP_NUM_THREADS", threads)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    state = host_state()
    assert (state.wait_policy, state.omp_num_threads) == (policy, threads)


def test_threads_and_load(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        monkeypatch.setattr(os, "getloadavg", lambda: (0.25, 4.0, 9.0))
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5}, raising=False)
        state = host_state()
    finally:
        torch.set_num_threads(before)
    assert (state.threads, state.cpus, state.load) == (1, 3, 0.25)


def test_where_the_system_has_no_load(monkeypatch):
    def refuse():
        raise OSError

    monkeypatch.setattr(os, "getloadavg", refuse)
    assert host_state().load is None


def test_where_processes_are_bound_to_no_processor(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert host_state().cpus == 7


def test_as_json():
    state = host_state()
    assert json.loads(json.dumps(state.to_dict())) == state.to_dict()
    assert state.threads == torch.get_num_threads()


@pytest.mark.parametrize(
    ("threads", "policy", "text"),
    [
        (1, None, None),
        (2, "passive", None),
        (2, "PASSIVE", None),
        (2, None, "OMP_WAIT_POLICY is not set: threads that wait spin"),
        (8, "active", "OMP_WAIT_POLICY is 'active': threads that wait spin"),
    ],
)
def test_what_a_reader_must_know(threads, policy, text):
    note = HostState(threads, 8, None, policy, None, None, None).note
    assert note is None if text is None else note.startswith(text)

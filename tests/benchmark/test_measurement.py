"""How samples are taken, on a clock that the test turns; no real time is looked at."""

import gc
import itertools
import json
import subprocess
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stackwise.benchmark import (
    Measurement,
    Workload,
    call_once,
    measure,
    measurement,
    memory,
    model_workload,
)
from stackwise.benchmark.clock import time_call
from stackwise.spec import ModelSpec

CPU = torch.device("cpu")


class Clock:
    """Time passes only in calls: each takes the next of `durations`."""

    def __init__(self, durations):
        self.durations, self.now, self.calls = iter(durations), 0.0, 0
        self.collecting, self.collected = [], []

    def time_call(self, call, device):
        call()
        duration = next(self.durations)
        self.now += duration
        self.calls += 1
        self.collecting.append(gc.isenabled())
        return duration


@pytest.fixture
def clock(monkeypatch):
    def use(durations):
        clock = Clock(durations)
        monkeypatch.setattr(measurement, "time_call", clock.time_call)
        monkeypatch.setattr(measurement, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
        monkeypatch.setattr(measurement, "peak_memory_bytes", lambda call, device: 4321)
        # A collection takes longer than all the rest of a test.
        monkeypatch.setattr(gc, "collect", lambda: clock.collected.append(clock.calls))
        return clock

    return use


def workload_of(call=lambda: None, tokens=0):
    return Workload("w", call, CPU, tokens)


def constant(seconds):
    return itertools.repeat(seconds)


def test_all_there_is_to_say(clock):
    clock([5.0, 2.0, 4.0, 2.0, 3.0, 2.1, *[1.0, 4.0, 2.0, 8.0]])
    result = measure(workload_of(tokens=6), min_calls=4, min_seconds=0.0, warmup_seconds=99.0)
    assert result == Measurement("w", (1.0, 4.0, 2.0, 8.0), 6, 6, True, 4321)


@pytest.mark.parametrize(
    "min_calls, min_seconds, expected",
    [(5, 0.0, 5), (5, 1.0, 5), (5, 2.0, 8), (1, 0.0, 1), (1, 0.5, 2), (1, 0.76, 4), (0, 0.6, 3)],
)
def test_samples_until_both_minima_are_met(clock, min_calls, min_seconds, expected):
    clock(constant(0.25))
    result = measure(workload_of(), min_calls=min_calls, min_seconds=min_seconds)
    assert result.seconds == (0.25,) * expected


@given(st.lists(st.floats(0.01, 3.0), min_size=60, max_size=60), st.integers(1, 12), st.floats(0.0, 5.0))
def test_samples_are_no_more_than_needed(durations, min_calls, min_seconds):
    with pytest.MonkeyPatch.context() as patch:
        turned = Clock(itertools.chain([1.0] * 6, itertools.cycle(durations)))
        patch.setattr(measurement, "time_call", turned.time_call)
        patch.setattr(measurement, "peak_memory_bytes", lambda call, device: None)
        patch.setattr(gc, "collect", lambda: 0)
        result = measure(workload_of(), min_calls=min_calls, min_seconds=min_seconds)
    taken = result.seconds
    assert len(taken) >= min_calls
    assert sum(taken) >= min_seconds
    assert len(taken) == min_calls or sum(taken[:-1]) < min_seconds


@pytest.mark.parametrize(
    "windows, steady, warmup_calls",
    [
        ([1.0, 1.0], True, 6),
        ([1.0, 1.04], True, 6),
        ([1.0, 0.96], True, 6),
        ([2.0, 1.0, 1.0], True, 9),
        ([4.0, 2.0, 1.0, 0.97], True, 12),
        ([1.0, 2.0, 4.0, 8.0], False, 12),
    ],
)
def test_warm_up(clock, windows, steady, warmup_calls):
    # The fastest of three calls counts: the other two are disturbed.
    calls = [duration for window in windows for duration in (window * 1.5, window, window * 3)]
    turned = clock(itertools.chain(calls, constant(1.0)))
    result = measure(workload_of(), min_calls=2, min_seconds=0.0, warmup_seconds=60.0)
    assert (result.steady, result.warmup_calls) == (steady, warmup_calls)
    assert turned.calls == warmup_calls + 2


def test_warm_up_of_no_time_is_one_window(clock):
    clock(constant(1.0))
    result = measure(workload_of(), min_calls=1, min_seconds=0.0, warmup_seconds=0.0)
    assert (result.steady, result.warmup_calls) == (False, 3)


@pytest.mark.parametrize("within, steady", [(0.05, False), (0.2, True)])
@pytest.mark.parametrize("unit", [1e-4, 1.0, 1e4])
def test_how_steady(clock, within, steady, unit):
    clock(itertools.cycle([unit] * 3 + [0.9 * unit] * 3))
    result = measure(
        workload_of(), min_calls=1, min_seconds=0.0, steady_within=within, warmup_seconds=50.0 * unit
    )
    assert result.steady is steady


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_while_samples_are_taken(clock, enabled):
    turned = clock(constant(1.0))
    (gc.enable if enabled else gc.disable)()
    try:
        measure(workload_of(), min_calls=4, min_seconds=0.0)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
    assert turned.collecting == [enabled] * 6 + [False] * 4
    assert turned.collected == [6], "once, between warm-up and samples"


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("failing_call", [2, 8])
def test_collection_is_as_it_was_after_an_exception(clock, enabled, failing_call):
    clock(constant(1.0))
    calls = itertools.count(1)

    def call():
        if next(calls) == failing_call:
            raise ZeroDivisionError

    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError):
            measure(workload_of(call), min_calls=4, min_seconds=0.0)
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_every_call_is_made(monkeypatch):
    calls = []
    monkeypatch.setattr(measurement, "peak_memory_bytes", lambda call, device: call() or 7)
    result = measure(workload_of(lambda: calls.append(1)), min_calls=4, min_seconds=0.0, warmup_seconds=0.0)
    assert len(calls) == result.warmup_calls + 4 + 1
    assert len(result.seconds) == 4
    assert all(seconds > 0 for seconds in result.seconds)
    assert result.peak_memory_bytes == 7


def test_a_real_model(subjects):
    workload = model_workload(ModelSpec.of(subjects.gru), "train", batch_size=2, seq_len=5)
    result = measure(workload, min_calls=3, min_seconds=0.0, warmup_seconds=0.0)
    assert (result.workload, result.tokens, len(result.seconds)) == ("gru train", 10, 3)
    stored = json.loads(json.dumps(result.to_dict()))
    assert stored["calls"] == 3
    assert stored["min_seconds"] <= stored["median_seconds"] <= stored["max_seconds"]


def test_one_call_is_no_measurement(clock):
    turned = clock(constant(2.0))
    assert call_once(workload_of(tokens=6)) == Measurement("w", (2.0,), 6, 0, False, None)
    assert turned.calls == 1


@pytest.mark.parametrize(
    "seconds, median", [((2.0,), 2.0), ((1.0, 9.0, 2.0), 2.0), ((4.0, 1.0, 2.0, 100.0), 3.0)]
)
def test_arithmetic(seconds, median):
    result = Measurement("w", seconds, 600, 6, True, None)
    assert result.median == median
    assert result.tokens_per_second == 600 / median
    stored = result.to_dict()
    assert stored == {
        "workload": "w",
        "median_seconds": median,
        "min_seconds": min(seconds),
        "max_seconds": max(seconds),
        "calls": len(seconds),
        "tokens_per_second": 600 / median,
        "peak_memory_bytes": None,
        "warmup_calls": 6,
        "steady": True,
        "execution": {},
    }


def test_time_of_a_call(monkeypatch):
    ticks = iter([1_000_000_000, 3_500_000_000])
    order = []
    monkeypatch.setattr(
        "stackwise.benchmark.clock.time",
        types.SimpleNamespace(perf_counter_ns=lambda: order.append("tick") or next(ticks)),
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
    assert time_call(lambda: order.append("call"), CPU) == 2.5
    assert order == ["tick", "call", "tick"]


def test_time_of_a_call_on_cuda_waits_on_both_sides(monkeypatch):
    order = []
    monkeypatch.setattr(
        "stackwise.benchmark.clock.time",
        types.SimpleNamespace(perf_counter_ns=lambda: order.append("tick") or 0),
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append(f"wait {device}"))
    time_call(lambda: order.append("call"), torch.device("cuda:1"))
    assert order == ["wait cuda:1", "tick", "call", "wait cuda:1", "tick"]


needs_reset = pytest.mark.skipif(
    memory.peak_memory_bytes(lambda: None, CPU) is None,
    reason="this kernel does not reset the high-water mark",
)


def peaks(*calls):
    """Bytes at the peak of each expression in turn, in a process whose allocator nothing has touched."""
    code = f"""
import torch
from stackwise.benchmark.memory import peak_memory_bytes
for call in ({"".join(f"lambda: {call}, " for call in calls)}):
    print(peak_memory_bytes(call, torch.device("cpu")))
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return [int(number) for number in output.split()]


@needs_reset
def test_peak_memory_sees_what_a_call_held():
    nothing, held = peaks("None", "torch.ones(50_000_000)")
    assert 150_000_000 < held - nothing < 260_000_000


@needs_reset
def test_peak_memory_forgets_what_an_earlier_call_held():
    nothing, held, after = peaks("None", "torch.ones(50_000_000)", "None")
    assert held - after > 150_000_000
    assert abs(after - nothing) < 100_000_000


def test_peak_memory_where_the_reset_is_refused(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "no" / "such" / "folder")
    assert memory.peak_memory_bytes(lambda: calls.append(1), CPU) is None
    assert not calls


def test_peak_memory_where_the_status_says_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "clear_refs")
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t  100 kB\n")
    assert memory.peak_memory_bytes(lambda: None, CPU) is None
    (tmp_path / "status").write_text("VmPeak:\t 900 kB\nVmHWM:\t  300 kB\n")
    assert memory.peak_memory_bytes(lambda: None, CPU) == 300 * 1024
    assert (tmp_path / "clear_refs").read_text() == "5"


def test_peak_memory_is_read_after_the_call(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "clear_refs")
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    (tmp_path / "status").write_text("VmHWM:\t 1 kB\n")

    def call():
        (tmp_path / "status").write_text("VmHWM:\t 2 kB\n")

    assert memory.peak_memory_bytes(call, CPU) == 2048

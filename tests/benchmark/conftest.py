"""Time that passes only where a test lets it, and a GPU that works in it."""

import types
from contextlib import nullcontext

import pytest
import torch

from stackwise.benchmark import Workload
from stackwise.benchmark.timing import clock, measurement, warmup


class VirtualTime:
    """What `time` tells: nanoseconds that only `take` adds."""

    def __init__(self):
        self.ns = 0

    def take(self, seconds):
        self.ns += round(seconds * 1e9)

    def module(self):
        return types.SimpleNamespace(perf_counter=lambda: self.ns / 1e9, perf_counter_ns=lambda: self.ns)

    def workload(self, durations, name="w", **others):
        """A workload on the CPU whose calls take the next of `durations`."""
        durations = iter(durations)
        return Workload(name, lambda: self.take(next(durations)), torch.device("cpu"), **others)


@pytest.fixture
def virtual_time(monkeypatch):
    time = VirtualTime()
    for module in (clock, measurement, warmup):
        monkeypatch.setattr(module, "time", time.module())
    monkeypatch.setattr(measurement, "peak_memory_bytes", lambda call, device: 4321)
    return time


class SimulatedGpu:
    """A device that works off its queues behind a host that runs ahead.

    A launch takes the host `HOST_NS`; the work begins when it is launched and all before it on its stream is
    done. An event is passed likewise, and can be read no sooner.
    """

    HOST_NS = 10_000
    CYCLES_PER_SECOND = 2e9

    def __init__(self, time):
        self.time, self.done, self.synchronizations, self.events = time, {}, 0, 0

    def launch(self, seconds, stream="main", host_ns=HOST_NS):
        self.time.ns += host_ns
        self.done[stream] = self.reached(stream) + round(seconds * 1e9)

    def reached(self, stream):
        return max(self.time.ns, self.done.get(stream, 0))

    def join(self, stream, other):
        self.done[stream] = max(self.reached(stream), self.reached(other))

    def synchronize(self, device=None):
        self.synchronizations += 1
        self.time.ns = max(self.time.ns, *self.done.values(), 0)

    def sleep(self, cycles):
        self.launch(cycles / self.CYCLES_PER_SECOND)


@pytest.fixture
def simulated_gpu(monkeypatch, virtual_time):
    gpu = SimulatedGpu(virtual_time)

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing, "it could not be read"
            gpu.events += 1

        def record(self, stream="main"):
            self.at = gpu.reached(stream)

        def synchronize(self):
            gpu.time.ns = max(gpu.time.ns, self.at)

        def elapsed_time(self, end):
            assert end.at <= gpu.time.ns, "it is read before it has been passed"
            return (end.at - self.at) * 1e-6

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", gpu.sleep, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: "main")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: {})
    return gpu

"""What has not run when its call returns is refused wherever calls are measured."""

import sys
import types

import pytest
import torch

from stackwise.benchmark import call_once, callable_workload, measure
from stackwise.benchmark.memory import fresh_process, memory_growth, peak_memory
from stackwise.benchmark.plain_call import checked_call, refuse_unstarted

QUICK = {"min_seconds": 0.0, "min_calls": 2, "warmup_seconds": 0.0}


def generator():
    yield 1


async def coroutine():
    return 1


async def async_generator():
    yield 1


class Awaited:
    def __await__(self):
        yield


UNSTARTED = pytest.mark.parametrize("call", [generator, coroutine, async_generator, Awaited])
CALLERS = {
    "measure": (lambda call: measure(callable_workload(call), **QUICK), "call"),
    "call_once": (lambda call: call_once(callable_workload(call)), "call"),
    "peak_memory": (peak_memory, "call"),
    "fresh process": (
        lambda call: fresh_process._measured(fresh_process._Request("", None, "", (), "cpu", 1)),
        "call",
    ),
    "memory_growth": (lambda call: memory_growth(call, steps=8, warmup=1), "step"),
}


@UNSTARTED
@pytest.mark.parametrize("caller", CALLERS)
def test_what_has_not_run_is_refused(call, caller, monkeypatch):
    monkeypatch.setattr(fresh_process, "_found", lambda request: lambda: call)
    measured, key = CALLERS[caller]
    with pytest.raises(TypeError) as raised:
        measured(call)
    told = f"{key}: got a function that returns a {call.__name__}, which has not run; wanted one that "
    assert str(raised.value).startswith(told)


@pytest.mark.parametrize("result", [None, 3, [1], iter([1]), torch.ones(2), generator])
def test_any_other_result_is_none_of_our_business(result):
    refuse_unstarted(result)


def test_later_calls_are_timed_as_they_are():
    """What looks at the first results is not among the samples."""
    seen = []

    class Call:
        def __call__(self):
            seen.append(sys._getframe(1).f_code.co_name)

    measure(callable_workload(Call()), **QUICK, calls_per_sample=1)
    assert seen[:3] == ["checked"] * 3
    assert "checked" not in seen[3:] and len(seen) > 3


class PlayedGpu:
    """A stream on which each call leaves work until it is waited for."""

    def __init__(self, monkeypatch):
        self.busy = True
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(query=self.query))

    def synchronize(self, device=None):
        self.busy = False

    def query(self):
        return not self.busy

    def launch(self):
        self.busy = True


def test_work_on_a_gpu_that_nobody_waits_for_is_refused(monkeypatch):
    gpu = PlayedGpu(monkeypatch)
    cpu = torch.device("cpu")
    checked_call(lambda: None, cpu)()  # what others have left there is not of this call
    with pytest.raises(
        ValueError, match=r"device: got 'cpu', but the call leaves work on a GPU.*: 'cuda' or"
    ):
        checked_call(gpu.launch, cpu)()
    with pytest.raises(ValueError, match="device: got 'cpu'"):
        measure(callable_workload(gpu.launch), **QUICK)
    checked_call(gpu.launch, torch.device("cuda"))()  # whose clock waits


@pytest.mark.gpu
def test_work_on_a_gpu_is_seen():
    weight = torch.ones(2048, 2048, device="cuda")
    with pytest.raises(ValueError, match="device: got 'cpu'"):
        measure(callable_workload(lambda: weight @ weight), **QUICK)
    measure(callable_workload(lambda: weight @ weight, device="cuda"), **QUICK)

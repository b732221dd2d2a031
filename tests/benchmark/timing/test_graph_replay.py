"""What is captured, what is refused, and under which name it is measured."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from stackwise.benchmark import Workload, measure
from stackwise.benchmark.flops.peak_rate import PeakRate
from stackwise.benchmark.timing.graph_replay import graph_replay
from stackwise.benchmark.workload import workload as workload_module
from stackwise.model import create_simple_rack

CUDA = torch.device("cuda")
PEAK = PeakRate("here", "published", {"float32": 1e9, "bfloat16": 16e9}, 1e8, {})


@pytest.fixture
def cuda(monkeypatch):
    """What is done on the device, in order."""
    done = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            done.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self):
            done.append("replay")

    @contextmanager
    def inside(name):
        done.append(f"into {name}")
        yield
        done.append(f"out of {name}")

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream("main"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: Stream("side"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: inside(stream.name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: inside("capture"))
    return done


def workload(call=lambda: None, device=CUDA, **others):
    return Workload("decode", call, device, **others)


@pytest.mark.parametrize("warmup_calls", [3, 5])
def test_warmed_up_beside_and_captured_once(cuda, warmup_calls):
    replayed = graph_replay(workload(lambda: cuda.append("call")), warmup_calls=warmup_calls)
    assert cuda == [
        "side waits for main",
        "into side",
        *["call"] * warmup_calls,
        "out of side",
        "main waits for side",
        "into capture",
        "call",
        "out of capture",
    ]
    cuda.clear()
    replayed.call()
    replayed.call()
    assert cuda == ["replay", "replay"]


def test_it_is_a_metric_of_its_own(cuda):
    original = workload(tokens=7, execution=lambda: {"attention": "flash"})
    replayed = graph_replay(original)
    assert replayed.name == "decode, CUDA graph replay"
    assert (replayed.tokens, replayed.device) == (7, CUDA)
    assert replayed.execution() == {"attention": "flash", "launch": "CUDA graph replay"}
    assert original.execution() == {"attention": "flash"}


def test_what_it_computes_is_counted_in_the_call(cuda, monkeypatch):
    """A replay shows no products: the peak would be that of the weights, and nothing recomputed."""
    monkeypatch.setattr(workload_module, "published_peak", lambda device: PEAK)
    rack = create_simple_rack(1, 1, d_model=16, d_ff=32, n_heads=2, vocab_size=11).eval()
    ids = torch.zeros(2, 8, dtype=torch.long)

    @torch.no_grad()
    def call():
        with torch.autocast("cpu", torch.bfloat16):
            rack(ids)

    original = workload(call, model=rack, mode="forward", batch_size=2, seq_len=8)
    used = original.utilization(1e-3)
    assert used.mfu > 0
    assert graph_replay(original).utilization(1e-3) == used


def test_its_memory_is_not_told(cuda, monkeypatch):
    """A replay asks the allocator for nothing, whatever the captured call took."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: {})
    assert measure(graph_replay(workload()), min_seconds=0.0).peak_memory_bytes is None


def test_what_cannot_be_captured(cuda):
    calls = []

    def call():
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(ValueError, match="'decode' cannot be captured as a CUDA graph: operation") as raised:
        graph_replay(workload(call))
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_an_error_of_the_call_itself_is_not_blamed_on_the_capture(cuda):
    def call():
        raise RuntimeError("shapes")

    with pytest.raises(RuntimeError, match="shapes"):
        graph_replay(workload(call))


def test_refused_on_a_processor():
    with pytest.raises(ValueError, match="got the workload 'decode' on cpu; allowed: one on a CUDA device"):
        graph_replay(workload(device=torch.device("cpu")))


def test_what_is_put_back_before_each_call_cannot_be_replayed(cuda):
    with pytest.raises(ValueError, match="puts something back before each call"):
        graph_replay(workload(prepare=lambda: None))
    assert cuda == []


@pytest.mark.parametrize("warmup_calls", [0, 2, 3.0])
def test_too_few_calls_before(cuda, warmup_calls):
    with pytest.raises(ValueError, match=f"warmup_calls: got {warmup_calls}; allowed: an integer >= 3"):
        graph_replay(workload(), warmup_calls=warmup_calls)
    assert cuda == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_does_the_same_work():
    x, y = torch.randn(64, 64, device=CUDA), torch.zeros(64, 64, device=CUDA)
    replayed = graph_replay(workload(lambda: torch.mm(x, x, out=y)))
    y.zero_()
    replayed.call()
    torch.testing.assert_close(y, x @ x)
    assert measure(replayed, min_seconds=0.0, clock="device").clock == "device"

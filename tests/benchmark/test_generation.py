"""When each token was there, on a clock that the test turns, and the latencies that follow from it."""

import gc
import json
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from stackwise.benchmark import Workload, generation, model_workload
from stackwise.benchmark.generation import GenerationMeasurement, generate_once, measure_generation
from stackwise.benchmark.timing.gpu_state import GpuState
from stackwise.benchmark.timing.warmup import WarmUp
from stackwise.subject.spec import ModelSpec

CPU = torch.device("cpu")
FREE, HELD = (GpuState(1980, 2619, 40, 300.0, reasons) for reasons in ((), ("power cap",)))
QUICK = {"min_seconds": 0.0, "min_calls": 3, "warmup_seconds": 0.0}


@pytest.fixture(autouse=True)
def _no_collections(monkeypatch):
    """A collection takes longer than all the rest of a test."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


def generating(gaps, calls=None):
    """A workload whose tokens take `gaps` seconds each on the clock of `turned`."""

    def each_token(on_token):
        for gap in gaps:
            turned.now += gap
            on_token(torch.zeros(2))
        if calls is not None:
            calls.append(gc.isenabled())

    turned = SimpleNamespace(now=0.0)
    workload = Workload(
        "w",
        lambda: each_token(lambda _: None),
        CPU,
        2 * len(gaps),
        batch_size=2,
        seq_len=10,
        each_token=each_token,
    )
    return workload, turned


@pytest.fixture
def turn(monkeypatch):
    def use(turned):
        ticks = SimpleNamespace(perf_counter_ns=lambda: round(turned.now * 1e9))
        monkeypatch.setattr(generation, "time", ticks)
        monkeypatch.setattr(
            generation, "warm_up", lambda call, *_, **how: call() or WarmUp(1, 0.0, True, None)
        )
        monkeypatch.setattr(generation, "peak_memory_bytes", lambda call, device: 4321)

    return use


def test_every_token_is_timed(turn):
    workload, turned = generating([1.0, 0.25, 0.5])
    turn(turned)
    result = measure_generation(workload, min_seconds=0.0, min_calls=2)
    assert result.token_seconds == (pytest.approx((1.0, 1.25, 1.75)),) * 2
    assert (result.batch_size, result.prompt_tokens, result.new_tokens, result.tokens) == (2, 10, 3, 6)
    assert (result.warmup_calls, result.steady, result.peak_memory_bytes) == (1, True, 4321)


@pytest.mark.parametrize(
    ("min_calls", "min_seconds", "expected"), [(1, 0.0, 1), (4, 0.0, 4), (1, 5.0, 3), (0, 0.0, 1)]
)
def test_generations_until_both_minima_are_met(turn, min_calls, min_seconds, expected):
    workload, turned = generating([1.0, 1.0])
    turn(turned)
    result = measure_generation(workload, min_seconds=min_seconds, min_calls=min_calls)
    assert len(result.token_seconds) == expected


def test_garbage_is_not_collected_meanwhile(turn):
    calls = []
    workload, turned = generating([1.0], calls)
    turn(turned)
    measure_generation(workload, min_seconds=0.0, min_calls=2)
    assert calls == [True, False, False]
    assert gc.isenabled()


def test_garbage_is_collected_between_generations(turn, monkeypatch):
    """What is new, each 0.2 s at most and at the end: the peak of memory has nothing of it."""
    calls, collected = [], []
    workload, turned = generating([0.06, 0.06], calls)
    turn(turned)
    monkeypatch.setattr(gc, "collect", lambda *generation: collected.append((len(calls), *generation)))
    measure_generation(workload, min_seconds=0.0, min_calls=5)
    assert collected == [(1,), (3, 1), (5, 1), (6, 1)]


def test_the_gpu_is_read_between_generations(turn, monkeypatch):
    """Each 0.2 s at most, and at the end: never inside a generation."""
    workload, turned = generating([0.03, 0.03])
    turn(turned)
    states = iter([FREE, FREE, HELD])
    read_at = []
    sensor = SimpleNamespace(note="no driver", read=lambda: read_at.append(turned.now) or next(states))
    monkeypatch.setattr(generation, "GpuSensor", lambda device: sensor)
    result = measure_generation(workload, min_seconds=0.0, min_calls=5)
    start = read_at[0]
    assert [at - start for at in read_at] == pytest.approx([0.0, 0.24, 0.3])
    assert result.gpu == (FREE, FREE, HELD)
    assert result.throttled
    assert result.notes[0] == "no driver"
    stored = json.loads(json.dumps(result.to_dict()))
    assert stored["throttled"] is True
    assert stored["gpu"]["throttled"] == {"power cap": 1}
    assert stored["notes"] == list(result.notes)


def test_latencies():
    # Two generations of two rows: tokens at 1, 2, 4 and at 2, 3, 4 seconds.
    found = GenerationMeasurement("w", ((1.0, 2.0, 4.0), (2.0, 3.0, 4.0)), 2, 10)
    assert found.ttft == (1.0, 2.0)
    assert found.itl == (1.0, 2.0, 1.0, 1.0)
    assert found.tpot == (1.5, 1.0)
    assert found.e2e == found.seconds == (4.0, 4.0)
    assert found.tokens_per_second == 6 / 4.0
    assert found.prefill_tokens_per_second == 20 / 1.5
    assert found.decode_tokens_per_second == 2 / 1.25
    assert found.percentile(50, "itl").value == statistics.median([1.0, 2.0, 1.0, 1.0])
    assert found.percentile(99).value is None, "of four gaps nobody knows the slowest in a hundred"


def test_mean_of_gaps_is_no_gap():
    """One slow token among many: TPOT hides it, ITL does not."""
    times = [0.5]
    for number in range(1000):
        times.append(times[-1] + (1.0 if number % 50 == 0 else 0.01))
    found = GenerationMeasurement("w", (tuple(times),), 1, 4)
    assert found.percentile(50, "itl").value == pytest.approx(0.01)
    assert found.percentile(99, "itl").value == pytest.approx(1.0)
    assert found.tpot[0] == pytest.approx((20 * 1.0 + 980 * 0.01) / 1000)


def test_one_token_has_no_gap():
    found = GenerationMeasurement("w", ((1.0,), (3.0,)), 1, 4)
    assert found.itl == found.tpot == ()
    assert found.decode_tokens_per_second is None
    assert found.percentile(50, "itl") is None
    assert found.to_dict()["latencies"]["itl"] == {}
    assert found.median == 2.0


def test_other_latencies():
    found = GenerationMeasurement("w", ((1.0, 2.0),), 1, 4)
    with pytest.raises(ValueError, match="of: got 'ttl'; allowed: 'ttft', 'itl', 'tpot', 'e2e'"):
        found.percentile(50, "ttl")


def test_on_cuda_each_token_is_waited_for(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))

    def each_token(on_token):
        for _ in range(2):
            order.append("token")
            on_token(None)

    workload = Workload("w", list, torch.device("cuda:1"), 2, batch_size=1, seq_len=1, each_token=each_token)
    generate_once(workload)
    assert order == ["wait", "token", "wait", "token", "wait"]


@pytest.mark.parametrize("name", ["rack", "llama", "gru"])
def test_a_real_model(subjects, name):
    spec = ModelSpec.of(getattr(subjects, name))
    workload = model_workload(spec, "generate", batch_size=2, seq_len=5, new_tokens=4)
    result = measure_generation(workload, **QUICK)
    stored = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert (stored["calls"], stored["new_tokens"], stored["prompt_tokens"]) == (3, 4, 5)
    for times in result.token_seconds:
        assert list(times) == sorted(times)
        assert len(times) == 4
        assert times[0] > 0
    assert stored["execution"]["generate"].startswith("greedy")
    assert len(generate_once(workload).token_seconds) == 1


def test_what_the_workload_tells(subjects):
    workload = model_workload(ModelSpec.of(subjects.gru), "generate", batch_size=1, seq_len=4, new_tokens=2)
    workload = replace(workload, notes=lambda: ("mind this",))
    for found in (measure_generation(workload, **QUICK), generate_once(workload)):
        assert "mind this" in found.notes


def test_another_workload(subjects):
    workload = model_workload(ModelSpec.of(subjects.gru), "decode", batch_size=1, seq_len=4)
    for function in (measure_generation, generate_once):
        with pytest.raises(ValueError, match="workload: got 'gru decode'; allowed: what model_workload"):
            function(workload)


@pytest.mark.parametrize(
    ("key", "value"), [("clock", "sun"), ("clock", "device"), ("min_seconds", -1), ("min_calls", 1.5)]
)
def test_other_settings(subjects, key, value):
    workload = model_workload(ModelSpec.of(subjects.gru), "generate", batch_size=1, seq_len=4, new_tokens=2)
    with pytest.raises(ValueError, match=f"{key}: got {value!r}; allowed"):
        measure_generation(workload, **{key: value})


@pytest.mark.gpu
def test_device_clock_reads_events(subjects):
    spec = ModelSpec.of(subjects.llama)
    workload = model_workload(spec, "generate", batch_size=2, seq_len=5, new_tokens=4, device="cuda")
    result = measure_generation(workload, clock="device", **QUICK)
    assert result.clock == "device"
    assert all(list(times) == sorted(times) for times in result.token_seconds)


def test_as_text():
    found = GenerationMeasurement("rack generate", ((0.5, 0.75, 1.0), (0.5, 0.75, 1.0)), 2, 16)
    assert str(found) == "rack generate: TTFT 500.000 ms, TPOT 250.000 ms, 6 tokens/s, 2 generations"
    assert str(replace(found, token_seconds=((0.5,),))) == (
        "rack generate: TTFT 500.000 ms, 4 tokens/s, 1 generation"
    )
    assert "0.75" not in repr(found)

"""How samples are taken, in time that the test counts; no real time is looked at."""

import gc
import itertools
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stackwise.benchmark import Measurement, Workload, call_once, measure, model_workload
from stackwise.benchmark.timing import measurement
from stackwise.benchmark.timing.cache_state import RotatingCall
from stackwise.benchmark.timing.clock import HostClock
from stackwise.benchmark.timing.gpu_state import GpuState
from stackwise.benchmark.timing.measurement import uncollected
from stackwise.benchmark.timing.warmup import WarmUp
from stackwise.subject.spec import ModelSpec

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def workload_of(call=lambda: None, tokens=0):
    return Workload("w", call, CPU, tokens)


@pytest.fixture(autouse=True)
def _uncollected(monkeypatch):
    """A collection takes longer than all the rest of a test."""
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)


def test_all_there_is_to_say(virtual_time):
    durations = [5.0, 2.0, 4.0, 2.0, 3.0, 2.001, *[1.0, 4.0, 2.0, 8.0]]
    workload = virtual_time.workload(durations, tokens=6, execution=lambda: {"attention": "flash"})
    result = measure(workload, min_calls=4, min_seconds=0.0, warmup_seconds=99.0)
    assert result.seconds == pytest.approx((1.0, 4.0, 2.0, 8.0))
    assert (result.workload, result.tokens, result.peak_memory_bytes) == ("w", 6, 4321)
    assert (result.warmup.calls, result.warmup.steady, result.warmup.reason) == (6, True, None)
    assert (result.clock, result.cache, result.calls_per_sample) == ("host", "warm", 1)
    assert result.execution == {"attention": "flash"}
    assert result.host.threads == torch.get_num_threads()
    assert (result.gpu, result.throttled, result.notes) == ((), False, ())


@pytest.mark.parametrize(
    "min_calls, min_seconds, expected",
    [(5, 0.0, 5), (5, 1.0, 5), (5, 2.0, 8), (1, 0.0, 1), (1, 0.5, 2), (1, 0.76, 4), (0, 0.6, 3), (0, 0.0, 1)],
)
def test_samples_until_both_minima_are_met(virtual_time, min_calls, min_seconds, expected):
    result = measure(
        virtual_time.workload(itertools.repeat(0.25)), min_calls=min_calls, min_seconds=min_seconds
    )
    assert result.seconds == pytest.approx([0.25] * expected)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(0.25, 3.0), min_size=5, max_size=60), st.integers(1, 12), st.floats(0.0, 5.0))
def test_samples_are_no_more_than_needed(virtual_time, durations, min_calls, min_seconds):
    """Of calls that are longer than a slice, each is a slice."""
    workload = virtual_time.workload(itertools.chain([1.0] * 6, itertools.cycle(durations)))
    taken = measure(workload, min_calls=min_calls, min_seconds=min_seconds).seconds
    assert len(taken) >= min_calls
    assert sum(taken) >= min_seconds - 1e-6
    assert len(taken) == min_calls or sum(taken[:-1]) < min_seconds


def test_short_samples_are_taken_in_slices(virtual_time, monkeypatch):
    slices = []
    sample = HostClock.sample

    def watched(self, call, count, **options):
        slices.append(count)
        return sample(self, call, count, **options)

    monkeypatch.setattr(HostClock, "sample", watched)
    result = measure(virtual_time.workload(itertools.repeat(1.05e-3)), min_calls=5, min_seconds=1.0)
    # Two windows of warm-up, what is asked for at least, then 0.2 s each.
    assert slices == [3, 10, 5, 191, 191, 191, 191, 184]
    assert len(result.seconds) == 953


def test_what_is_flushed_or_put_back_takes_of_the_time_too(virtual_time):
    """Or a second of samples of 0.1 ms, with 10 ms before each, would be two minutes."""
    workload = virtual_time.workload(itertools.repeat(1e-4), prepare=lambda: virtual_time.take(0.01))
    result = measure(workload, min_calls=5, min_seconds=1.0)
    assert len(result.seconds) == 100
    assert result.median == pytest.approx(1e-4)


class TestShortCalls:
    def test_are_timed_together(self, virtual_time):
        result = measure(virtual_time.workload(itertools.repeat(2.1e-6)), min_calls=5, min_seconds=0.0)
        assert result.calls_per_sample == 24, "50 us"
        assert result.seconds == pytest.approx([2.1e-6] * 5)
        assert (result.to_dict()["calls"], result.to_dict()["samples"]) == (120, 5)
        assert result.notes == ()

    @pytest.mark.parametrize("seconds, together", [(51e-6, 1), (49e-6, 2), (9e-9, 5556)])
    def test_as_many_as_take_50_us(self, virtual_time, seconds, together):
        result = measure(virtual_time.workload(itertools.repeat(seconds)), min_calls=1, min_seconds=0.0)
        assert result.calls_per_sample == together

    def test_or_as_many_as_are_asked_for(self, virtual_time):
        workload = virtual_time.workload(itertools.repeat(2.1e-6))
        result = measure(workload, min_seconds=0.0, calls_per_sample=7)
        assert (result.calls_per_sample, result.notes) == (7, ())
        result = measure(workload, min_seconds=0.0, calls_per_sample=1)
        assert result.calls_per_sample == 1
        [note] = result.notes
        assert note == (
            "a call of 2.1 us was timed alone, since calls_per_sample is 1: to about 0.5 us on the device "
            "clock, 0.1 us on the host's"
        )
        long = virtual_time.workload(itertools.repeat(51e-6))
        assert measure(long, min_seconds=0.0, calls_per_sample=1).notes == ()

    @pytest.mark.parametrize(("min_calls", "samples"), [(5, 400), (600, 600)])
    def test_are_not_timed_alone_for_ever(self, virtual_time, min_calls, samples):
        """A second of calls of 1 us would be a million samples."""
        workload = virtual_time.workload(itertools.repeat(2.1e-6))
        result = measure(workload, min_seconds=0.01, min_calls=min_calls, calls_per_sample=1)
        assert len(result.seconds) == samples
        assert result.notes[1] == (
            f"{samples} samples took 0.001 s of the 0.01 s asked for: no more are taken than min_calls, or "
            "40,000 for each second"
        )
        together = measure(workload, min_seconds=0.01)
        assert sum(together.seconds) * together.calls_per_sample >= 0.01 - 1e-6
        assert together.notes == ()

    def test_tell_no_tail(self, virtual_time):
        """The mean of 24 calls hides the slowest of them."""
        result = measure(virtual_time.workload(itertools.repeat(2.1e-6)), min_calls=2000, min_seconds=0.0)
        assert result.p50.value == pytest.approx(2.1e-6)
        assert (result.p95.value, result.p99.value, result.p99.high) == (None, None, None)
        one_by_one = virtual_time.workload(itertools.repeat(2.1e-6))
        result = measure(one_by_one, min_calls=2000, min_seconds=0.0, calls_per_sample=1)
        assert result.p99.value == pytest.approx(2.1e-6)

    def test_that_need_something_put_back_are_timed_alone(self, virtual_time):
        order = []
        workload = virtual_time.workload(itertools.repeat(2.1e-6), prepare=lambda: order.append("prepare"))
        call = workload.call
        workload = replace(workload, call=lambda: order.append("call") or call())
        result = measure(workload, min_calls=4, min_seconds=0.0)
        assert result.calls_per_sample == 1
        # The last is for the peak of memory.
        assert order == ["prepare", "call"] * (result.warmup_calls + 4) + ["prepare"]
        [note] = result.notes
        assert note == (
            "a call of 2.1 us was timed alone, since something is put back before each call: to about 0.5 us "
            "on the device clock, 0.1 us on the host's"
        )
        with pytest.raises(ValueError, match="calls_per_sample: got 3; allowed: 1, since something is put"):
            measure(workload, calls_per_sample=3)


class TestCache:
    @pytest.fixture
    def flushes(self, monkeypatch):
        order = []

        class Flush:
            def __init__(self, device):
                order.append(f"made for {device}")

            def __call__(self):
                order.append("flush")

            def __del__(self):
                order.append("let go")

        monkeypatch.setattr(measurement, "CacheFlush", Flush)
        monkeypatch.setattr(
            measurement, "peak_memory_bytes", lambda call, device: order.append("peak") or call()
        )
        return order

    def test_warm_is_not_flushed(self, virtual_time, flushes):
        assert measure(virtual_time.workload(itertools.repeat(1.0)), min_calls=2).cache == "warm"
        assert flushes == ["peak"]

    def test_cold_is_flushed_before_each_call_and_not_in_the_peak_of_memory(self, virtual_time, flushes):
        workload = virtual_time.workload(itertools.repeat(1.0), prepare=lambda: flushes.append("prepare"))
        call = workload.call
        workload = replace(workload, call=lambda: flushes.append("call") or call())
        result = measure(workload, cache="cold", min_calls=2, min_seconds=0.0)
        assert result.cache == "cold"
        each = ["prepare", "flush", "call"]
        assert flushes == ["made for cpu", *each * (6 + 2), "let go", "prepare", "peak", "call"]

    def test_several_calls_would_find_it_warm(self, virtual_time, flushes):
        short = virtual_time.workload(itertools.repeat(1e-6))
        result = measure(short, cache="cold", min_seconds=0.0)
        assert result.calls_per_sample == 1
        assert "only the first of several would find a cold cache" in result.notes[0]
        with pytest.raises(ValueError, match="calls_per_sample: got 2; allowed: 1, since only the first"):
            measure(short, cache="cold", calls_per_sample=2)

    def test_inputs_that_take_turns_are_cold_by_themselves(self, virtual_time, flushes, monkeypatch):
        monkeypatch.setattr("stackwise.benchmark.timing.cache_state.last_level_cache_bytes", lambda device: 1)
        call = RotatingCall(lambda x: virtual_time.take(1.1e-6), [torch.ones(2), torch.ones(2)])
        for cache in ("cold", "warm"):
            result = measure(Workload("w", call, CPU), cache=cache, min_seconds=0.0)
            assert (result.cache, result.calls_per_sample) == ("cold", 46)
        assert flushes == ["peak", "peak"]

    @pytest.mark.parametrize("cache", ["hot", "", None])
    def test_other_states(self, cache):
        with pytest.raises(ValueError, match=r"cache: got .*; allowed: 'cold', 'warm'"):
            measure(workload_of(pytest.fail), cache=cache)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"clock": "gpu"}, "clock: got 'gpu'; allowed: 'host', 'device'"),
        ({"clock": "device"}, "clock: got 'device'; allowed: 'host' on cpu"),
        ({"min_seconds": -1.0}, "min_seconds: got -1.0; allowed: a number >= 0"),
        ({"min_calls": -1}, "min_calls: got -1; allowed: an integer >= 0"),
        ({"min_calls": 2.5}, "min_calls: got 2.5; allowed: an integer >= 0"),
        ({"warmup_seconds": -1}, "warmup_seconds: got -1; allowed: a number >= 0"),
        ({"steady_within": "x"}, "steady_within: got 'x'; allowed: a number >= 0"),
        ({"calls_per_sample": 0}, "calls_per_sample: got 0; allowed: an integer >= 1"),
    ],
)
def test_other_options(options, message):
    with pytest.raises(ValueError, match=message):
        measure(workload_of(pytest.fail), **options)


def test_a_clock_of_ones_own(virtual_time):
    """Of a device that tells its own time, say: what it reads is what is kept."""

    class Halved(HostClock):
        name, notes = "halved", ("by half",)

        def sample(self, call, count, **options):
            return [seconds / 2 for seconds in super().sample(call, count, **options)]

    result = measure(
        virtual_time.workload(itertools.repeat(0.5)), clock=Halved(CPU), min_calls=3, min_seconds=0.0
    )
    assert (result.clock, result.notes) == ("halved", ("by half",))
    assert result.seconds == pytest.approx([0.25] * 3)


class TestOnTheDeviceClock:
    @pytest.fixture
    def readings(self, simulated_gpu, monkeypatch):
        """The sensor of a GPU that gets hot."""
        states = itertools.chain(
            [GpuState(1980, 2619, 40, 300.0, ())],
            itertools.repeat(GpuState(1400, 2619, 90, 300.0, ("software thermal slowdown",))),
        )
        sensor = type("Sensor", (), {"note": None, "read": lambda self: next(states)})()
        monkeypatch.setattr(measurement, "GpuSensor", lambda device: sensor)
        return sensor

    def test_time_of_the_work(self, simulated_gpu, readings):
        call = lambda: [simulated_gpu.launch(20e-6) for _ in range(5)]  # noqa: E731
        result = measure(Workload("w", call, CUDA), clock="device", min_calls=300, min_seconds=0.0)
        assert result.clock == "device"
        assert result.seconds == pytest.approx([100e-6] * 300)
        assert result.warmup.steady
        # Two windows, six calls to learn what the call is like, three as it is then timed.
        assert result.warmup.calls > 3 + 3 + 6 + 3

    def test_the_gpu_is_read_between_slices(self, simulated_gpu, readings):
        call = lambda: simulated_gpu.launch(1e-3)  # noqa: E731
        result = measure(Workload("w", call, CUDA), min_calls=1, min_seconds=0.4)
        assert len(result.gpu) >= 3
        assert [state.throttled for state in result.gpu] == [False] + [True] * (len(result.gpu) - 1)
        assert result.throttled
        assert result.to_dict()["gpu"]["sm_clock_mhz"] == [1400, 1980]

    def test_what_could_not_be_read_is_noted(self, simulated_gpu, monkeypatch):
        sensor = type("Sensor", (), {"note": "it was not read", "read": lambda self: None})()
        monkeypatch.setattr(measurement, "GpuSensor", lambda device: sensor)
        result = measure(Workload("w", lambda: simulated_gpu.launch(1e-3), CUDA), min_seconds=0.0)
        assert (result.gpu, result.throttled, result.notes) == ((), False, ("it was not read",))

    def test_what_the_clock_says_is_noted(self, simulated_gpu, readings):
        def call():
            simulated_gpu.launch(1e-3)
            simulated_gpu.synchronize()

        result = measure(Workload("w", call, CUDA), clock="device", min_seconds=0.0)
        assert "the call waits for the device" in result.notes[0]


def test_without_a_warm_up_it_is_another_number(virtual_time):
    """The source of many published figures: the first call, which compiles, is averaged with the others."""
    durations = [3.0, 0.5, *[0.1] * 100]
    start, workload = virtual_time.ns, virtual_time.workload(durations)
    for _ in range(10):
        workload.call()
    naive = (virtual_time.ns - start) * 1e-9 / 10
    ours = measure(virtual_time.workload(durations), min_calls=10, min_seconds=0.0)
    assert naive == pytest.approx(0.43)
    assert ours.seconds == pytest.approx([0.1] * 10)


class TestGarbage:
    @pytest.fixture
    def seen(self, monkeypatch):
        """For each call whether garbage may be collected, and after how many calls it was."""
        calls, collected = [], []
        monkeypatch.setattr(gc, "collect", lambda *generation: collected.append((len(calls), *generation)))
        return calls, collected

    @pytest.mark.parametrize("enabled", [True, False])
    def test_is_not_collected_while_samples_are_taken(self, virtual_time, seen, enabled):
        calls, collected = seen

        def call():
            virtual_time.take(1.0)
            calls.append(gc.isenabled())

        (gc.enable if enabled else gc.disable)()
        try:
            measure(workload_of(call), min_calls=4, min_seconds=0.0)
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
        assert calls == [enabled] * 6 + [False] * 4
        assert collected[0] == (6,), "between warm-up and samples"
        assert collected[1:] == [(7, 1), (8, 1), (9, 1), (10, 1)], "what is new, between slices"

    @pytest.mark.parametrize("enabled", [True, False])
    @pytest.mark.parametrize("failing_call", [2, 8])
    def test_is_collected_as_before_after_an_exception(self, virtual_time, seen, enabled, failing_call):
        def call():
            virtual_time.take(1.0)
            seen[0].append(1)
            if len(seen[0]) == failing_call:
                raise ZeroDivisionError

        (gc.enable if enabled else gc.disable)()
        try:
            with pytest.raises(ZeroDivisionError):
                measure(workload_of(call), min_calls=4, min_seconds=0.0)
            assert gc.isenabled() == enabled
        finally:
            gc.enable()

    def test_is_collected_as_the_caller_has_it(self):
        assert gc.isenabled()
        with uncollected():
            assert not gc.isenabled()
            with uncollected():
                assert not gc.isenabled()
            assert not gc.isenabled()
        assert gc.isenabled()


def test_every_call_is_made(monkeypatch):
    calls = []
    monkeypatch.setattr(measurement, "peak_memory_bytes", lambda call, device: call() or 7)
    result = measure(
        workload_of(lambda: calls.append(1)),
        min_calls=4,
        min_seconds=0.0,
        warmup_seconds=0.0,
        calls_per_sample=1,
    )
    assert len(calls) == result.warmup_calls + 4 + 1
    assert len(result.seconds) == 4
    assert all(seconds > 0 for seconds in result.seconds)
    assert result.peak_memory_bytes == 7


def test_a_real_model(subjects):
    workload = model_workload(ModelSpec.of(subjects.gru), "train", batch_size=2, seq_len=5)
    result = measure(workload, min_calls=3, min_seconds=0.0, warmup_seconds=0.0)
    assert (result.workload, result.tokens, len(result.seconds)) == ("gru train", 10, 3)
    stored = json.loads(json.dumps(result.to_dict()))
    assert stored["samples"] == 3
    assert stored["min_seconds"] <= stored["median_seconds"] <= stored["max_seconds"]


def test_a_real_model_in_a_cold_cache(subjects):
    workload = model_workload(ModelSpec.of(subjects.gru), "forward", batch_size=2, seq_len=5)
    result = measure(workload, cache="cold", min_calls=3, min_seconds=0.0, warmup_seconds=0.0)
    assert (result.cache, len(result.seconds)) == ("cold", 3)


@pytest.mark.parametrize("policy, told", [("PASSIVE", False), ("ACTIVE", True), (None, True)])
def test_threads_that_spin_are_told(virtual_time, monkeypatch, policy, told):
    """Without the plugin nobody has seen to it that they sleep."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    result = measure(virtual_time.workload(itertools.repeat(1.0)), min_calls=1, min_seconds=0.0)
    assert result.host.wait_policy == policy
    assert [note for note in result.notes if note.startswith("OMP_WAIT_POLICY")] == (
        [result.host.note] if told else []
    )


def test_one_call_is_no_measurement(virtual_time):
    prepared = []
    workload = virtual_time.workload([2.0], tokens=6, prepare=lambda: prepared.append(virtual_time.ns))
    result = call_once(workload)
    assert result == Measurement("w", (2.0,), 6)
    assert (result.steady, result.warmup.reason, result.peak_memory_bytes) == (False, "not warmed up", None)
    assert prepared == [0]


@pytest.mark.parametrize(
    "seconds, median", [((2.0,), 2.0), ((1.0, 9.0, 2.0), 2.0), ((4.0, 1.0, 2.0, 100.0), 3.0)]
)
def test_arithmetic(seconds, median):
    warmup = WarmUp(6, 0.5, False, "two windows differed by 4.0% after 6 calls", 1.0, 1.5)
    result = Measurement("w", seconds, 600, warmup=warmup)
    assert result.median == median
    assert result.tokens_per_second == 600 / median
    assert result.p50.value == median
    withheld = {"value": None, "low": None, "high": None, "count": len(seconds), "confidence": 0.95}
    assert result.to_dict() == {
        "workload": "w",
        "median_seconds": median,
        "min_seconds": min(seconds),
        "max_seconds": max(seconds),
        "calls": len(seconds),
        "samples": len(seconds),
        "calls_per_sample": 1,
        "percentiles": {
            "p50": withheld | {"q": 50, "value": median},
            "p95": withheld | {"q": 95},
            "p99": withheld | {"q": 99},
        },
        "histograms": {"call": None},
        "tokens_per_second": 600 / median,
        "peak_memory_bytes": None,
        "warmup_calls": 6,
        "steady": False,
        "warmup": {
            "calls": 6,
            "seconds": 0.5,
            "steady": False,
            "reason": "two windows differed by 4.0% after 6 calls",
            "call_seconds": 1.0,
            "period_seconds": 1.5,
        },
        "clock": "host",
        "cache": "warm",
        "host": None,
        "gpu": None,
        "throttled": False,
        "execution": {},
        "notes": [],
    }


def test_percentiles_of_many_samples():
    result = Measurement("w", tuple(n / 1000 for n in range(1, 1001)), 0)
    assert result.p99.value == pytest.approx(0.99, abs=1e-3)
    assert result.p99.low < result.p99.value < result.p99.high
    assert result.percentile(25, confidence=0.5).confidence == 0.5
    assert result.tokens_per_second is None, "it has no tokens: a rate of 0 would be another thing"


def test_as_text():
    """One line for people; its repr has no samples, of which there may be thousands."""
    few = Measurement("rack decode", (0.001, 0.003, 0.002), 4)
    assert str(few) == "rack decode: 2.000 ms, 2,000 tokens/s, 3 samples"
    many = replace(few, seconds=(0.002,) * 9 + (0.0015, 0.0025), tokens=0)
    assert str(many) == "rack decode: 2.000 ms (2.000 to 2.000), 11 samples"
    assert "0.001" not in repr(few)
    assert "rack decode" in repr(few)

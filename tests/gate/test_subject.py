"""What a process of a side does when it is told to."""

import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from stackwise.benchmark.plain_call import refuse_unstarted
from stackwise.gate.side import subject
from stackwise.gate.side.subject import Repeated, Streamed, peak_memory, warm_up


class Clock:
    """A clock on which only `sleep` takes time."""

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def perf_counter(self):
        return self.now

    def perf_counter_ns(self):
        return round(self.now * 1e9)

    process_time = thread_time = perf_counter


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(subject, "real_time", made)
    return made


def test_seconds_are_of_one_call(clock):
    calls = []

    def call():
        calls.append(None)
        clock.sleep(len(calls) * 0.001)

    assert Repeated(call).seconds(5)["time"] == pytest.approx(0.003)
    assert len(calls) == 5


def test_what_surrounds_a_call_is_not_in_its_time(clock):
    log = []

    def step(name, seconds):
        log.append(name)
        clock.sleep(seconds)

    repeated = Repeated(lambda: step("call", 0.5), lambda: step("before", 7.0), lambda: step("after", 9.0))
    assert repeated.seconds(2) == {"time": 0.5}
    assert log == ["before", "call", "after"] * 2


def generator():
    yield


async def coroutine():
    pass


async def stream():
    yield


@pytest.mark.parametrize("call", [generator, coroutine, stream])
@pytest.mark.parametrize("subject_of", [Repeated, lambda call: Streamed(lambda _: call())])
def test_unstarted_call_is_refused_as_callable_workload_refuses_it(call, subject_of):
    with pytest.raises(TypeError) as theirs:
        refuse_unstarted(call())
    with pytest.raises(TypeError) as ours:
        subject_of(call).seconds(1)
    assert str(ours.value) == str(theirs.value)


def test_first_result_is_checked_after_its_time_and_later_ones_are_not(clock, monkeypatch):
    results, checked = iter("abcd"), []

    def check(result):
        checked.append(result)
        clock.sleep(100.0)

    monkeypatch.setattr(subject, "refuse_unstarted", check)
    repeated = Repeated(lambda: clock.sleep(1.0) or next(results))
    assert repeated.seconds(1) == {"time": 1.0}
    assert repeated.seconds(3) == {"time": 1.0}
    assert checked == ["a"]


def test_first_token_and_later_ones(clock):
    def text(on_token):
        clock.sleep(0.03)
        for number in range(4):
            clock.sleep(0.01 * bool(number))
            on_token(number)
        clock.sleep(0.02)

    found = Streamed(text).seconds(2)
    assert found == pytest.approx({"time": 0.08, "ttft": 0.03, "tpot": 0.01})


def test_a_text_of_one_token_has_no_later_ones():
    assert Streamed(lambda on_token: on_token(0)).seconds(1)["tpot"] == 0.0


@pytest.mark.parametrize(("lengths", "lacks"), [((3, 1, 2), {"tpot"}), ((2, 0), {"ttft", "tpot"})])
def test_what_one_of_several_texts_lacks_is_told_of_none(clock, lengths, lacks):
    left = iter(lengths)

    def text(on_token):
        clock.sleep(0.01)
        for _ in range(next(left)):
            clock.sleep(0.01)
            on_token(0)

    found = Streamed(text).seconds(len(lengths))
    assert {metric for metric, seconds in found.items() if seconds == 0} == lacks


def test_warm_up_makes_calls_for_its_time_and_tells_the_fastest(clock):
    seconds = iter([5.0, 0.25, *[0.5] * 1000])
    found = warm_up(Repeated(lambda: clock.sleep(next(seconds))), 10.0)
    assert (found["call"], found["period"]) == (0.25, 0.25)
    assert clock.now == pytest.approx(10.25)


def test_warm_up_calls_twice_however_long_it_takes(clock):
    found = warm_up(Repeated(lambda: clock.sleep(30.0)), 1.0)
    assert (found["call"], found["period"]) == pytest.approx((30.0, 30.0))
    assert clock.now == 60.0


def test_warm_up_of_short_calls_makes_many_at_once(clock):
    made = []

    def call():
        made.append(None)
        clock.sleep(1e-6)

    assert warm_up(Repeated(call), 0.01)["call"] == pytest.approx(1e-6, rel=1e-3)
    assert 10_000 <= len(made) <= 11_001


@pytest.mark.parametrize(
    ("calls_with_a_thread", "alone"), [((), 1.0), ((0, 1, 2, 3), 0.0), ((0,), 1.0), ((3,), 0.0)]
)
def test_warm_up_reports_other_threads_after_the_first_call(clock, monkeypatch, calls_with_a_thread, alone):
    calls, threads = itertools.count(), []

    class Watch:
        """In place of `Alone`, whose own test has real threads."""

        def __init__(self):
            threads.clear()

        def holds(self):
            return not threads

    def call():
        number = next(calls)
        threads.extend([number] * (number in calls_with_a_thread))
        clock.sleep(1.0)

    monkeypatch.setattr(subject, "Alone", Watch)
    assert warm_up(Repeated(call), 4.0)["alone"] == alone
    assert next(calls) == 4


def test_memory_of_tensors_is_exact():
    # Three tensors of which two live at a time: 40,000 + 80,000 bytes, then 80,000 + 120,000.
    def call():
        one = torch.ones(10_000)
        two = torch.ones(20_000)
        del one
        three = torch.ones(30_000)
        return two, three

    peak_memory(Repeated(call))  # what is made at first is there
    found = [peak_memory(Repeated(call))["memory"] for _ in range(2)]
    assert found[0] == found[1]
    assert 200_000 <= found[0] < 202_000  # Python's own objects


def test_memory_of_other_devices_is_not_that_of_the_host(monkeypatch):
    """Their allocators tell it themselves."""
    kinds = torch.autograd.DeviceType

    def event(nbytes, kind, moment):
        return SimpleNamespace(
            name=lambda: "[memory]", nbytes=lambda: nbytes, device_type=lambda: kind, start_ns=lambda: moment
        )

    class Profile:
        def __init__(self, **_):
            events = [event(1000, kinds.CPU, 0), event(5_000_000, kinds.CUDA, 1), event(300, kinds.CPU, 2)]
            self.kineto_results = SimpleNamespace(events=lambda: events)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(torch.autograd.profiler, "profile", Profile)
    assert peak_memory(Repeated(lambda: None))["memory"] == pytest.approx(1300, abs=500)


@pytest.mark.parametrize("backend", ["cuda", "xpu", "mps"])
def test_it_waits_for_the_accelerator_that_is_in_use(backend, monkeypatch):
    waited = []
    if backend == "mps":
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    else:
        monkeypatch.setattr(getattr(torch, backend), "is_initialized", lambda: True)
    monkeypatch.setattr(getattr(torch, backend), "synchronize", lambda: waited.append(len(waited)))
    Repeated(lambda: waited.append("call")).seconds(2)
    assert waited == [0, "call", "call", 3]


def test_memory_of_python_and_of_tensors():
    def call():
        return bytearray(100_000), torch.ones(25_000)

    peak_memory(Repeated(call))
    assert 200_000 <= peak_memory(Repeated(call))["memory"] < 202_000


def test_what_surrounds_a_call_is_in_the_period(clock):
    surrounded = Repeated(lambda: clock.sleep(0.5), lambda: clock.sleep(2.0))
    found = warm_up(surrounded, 1.0)
    assert (found["call"], found["period"]) == pytest.approx((0.5, 2.5))


def test_memory_that_was_there_before_does_not_count():
    held = torch.ones(1000)
    peak_memory(Repeated(lambda: held.sum()))
    assert peak_memory(Repeated(lambda: held.sum()))["memory"] < 2000


def test_memory_without_torch():
    program = """
import sys
from stackwise.gate.side import subject
from stackwise.gate.side.subject import Repeated, peak_memory
found = [peak_memory(Repeated(lambda: bytearray(1_000_000)))["memory"] for _ in range(3)]
assert "torch" not in sys.modules
print(*found)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = [float(value) for value in done.stdout.split()]
    assert found[1] == found[2]  # exact once what is made at first is there
    assert 1_000_000 <= found[1] < 1_010_000

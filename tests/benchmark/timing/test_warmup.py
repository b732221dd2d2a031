"""When a warm-up ends, in time that the test counts."""

import itertools
import json

import pytest
import torch

from stackwise.benchmark.timing import warmup
from stackwise.benchmark.timing.clock import HostClock
from stackwise.benchmark.timing.warmup import WarmUp, warm_up

CPU = torch.device("cpu")


@pytest.fixture
def warm(virtual_time):
    """A warm-up of calls that take these seconds."""

    def run(durations, **options):
        return warm_up(virtual_time.workload(durations).call, CPU, HostClock(CPU), **options)

    return run


def windows(*fastest):
    """Calls of windows of three: the other two are disturbed."""
    return [seconds for each in fastest for seconds in (1.5 * each, each, 3 * each)]


def test_all_there_is_to_say(warm):
    found = warm(windows(2.0, 1.0, 1.001), seconds=100.0)
    seconds, each, period = (pytest.approx(n) for n in (22.0055, 1.001, 5.5055 / 3))
    assert found == WarmUp(9, seconds, True, None, each, period)
    assert json.loads(json.dumps(found.to_dict()))["steady"] is True


@pytest.mark.parametrize(
    "fastest, calls",
    [
        ([1.0, 1.0], 6),
        ([1.0, 1.0049], 6),
        ([1.0, 0.9951], 6),
        ([2.0, 1.0, 1.0], 9),
        ([4.0, 2.0, 1.0, 0.998], 12),
        # By 5 % a step it settles long before it has.
        ([1.1, 1.05, 1.02, 1.0, 1.0], 15),
    ],
)
def test_two_windows_that_agree_end_it(warm, fastest, calls):
    found = warm(windows(*fastest), seconds=1e4)
    assert (found.steady, found.calls, found.reason) == (True, calls, None)


def test_time_that_never_settles(warm):
    found = warm(windows(1.0, 2.0, 4.0, 8.0), seconds=60.0)
    assert (found.steady, found.calls) == (False, 12)
    assert found.reason == "two windows differed by 50.0% after 12 calls"


@pytest.mark.parametrize("within, steady", [(0.05, False), (0.2, True)])
@pytest.mark.parametrize("unit", [1e-2, 1.0, 1e4])
def test_how_steady(warm, within, steady, unit):
    durations = itertools.cycle([unit] * 3 + [0.9 * unit] * 3)
    assert warm(durations, within=within, seconds=50 * unit).steady is steady


def test_no_time_is_one_window(warm):
    found = warm(itertools.repeat(1.0), seconds=0.0)
    assert (found.steady, found.calls) == (False, 3)
    assert found.reason == "there was time for one undisturbed window only after 3 calls"


def test_the_first_window_takes_no_time_of_the_rest(warm):
    """It compiles: 100 s of it leave a second window all the same."""
    found = warm([100.0, 1.0, 1.0, 1.0, 1.0, 1.0], seconds=2.0)
    assert (found.steady, found.calls) == (True, 6)


def test_short_calls_make_a_window_of_10_ms(warm):
    found = warm(itertools.repeat(1.1e-3), seconds=1.0)
    assert (found.steady, found.calls) == (True, 3 + 10)
    assert warm(itertools.repeat(1e-7), seconds=1.0).calls == 3 + 1000


def test_what_comes_before_a_call_counts_for_windows_but_is_not_timed(warm, virtual_time):
    found = warm(itertools.repeat(1e-4), seconds=1.0, before=lambda: virtual_time.take(0.1))
    assert found == WarmUp(6, pytest.approx(0.6006), True, None, pytest.approx(1e-4), pytest.approx(0.1001))


@pytest.mark.parametrize(
    "name, reason",
    [("_compilations", "code was still being compiled"), ("_reserved_bytes", "the allocator still took")],
)
def test_nothing_is_steady_while_it_is_prepared(warm, monkeypatch, name, reason):
    """The count moves in the first two windows, whose times agree, and in no other."""
    counts = iter([0, 1, 1, 2, *[2] * 20])
    monkeypatch.setattr(warmup, name, lambda *device: next(counts))
    found = warm(itertools.repeat(1.0), seconds=100.0)
    assert (found.steady, found.calls) == (True, 12), "two windows after the last of them"

    counts = itertools.count()
    found = warm(itertools.repeat(1.0), seconds=10.0)
    assert not found.steady
    assert found.reason.startswith(reason)


def test_compilations_are_counted():
    shapes = itertools.count(2)
    torch._dynamo.reset()

    @torch.compile(backend="eager", dynamic=False)
    def double(x):
        return x * 2

    before = warmup._compilations()
    double(torch.ones(2))
    once = warmup._compilations()
    assert once > before
    double(torch.ones(2))
    assert warmup._compilations() == once
    found = warm_up(lambda: double(torch.ones(next(shapes))), CPU, HostClock(CPU), seconds=0.0)
    assert found.reason == "code was still being compiled after 3 calls"
    torch._dynamo.reset()


def test_nothing_is_compiled_where_no_compiler_is_loaded(monkeypatch):
    monkeypatch.delitem(warmup.sys.modules, "torch._dynamo.utils", raising=False)
    assert warmup._compilations() == 0


def test_memory_taken_from_the_device(monkeypatch):
    asked = []
    stats = {"reserved_bytes.all.allocated": 7, "reserved_bytes.all.current": 3}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: asked.append(device) or stats)
    assert warmup._reserved_bytes(torch.device("cuda:1")) == 7
    assert asked == [torch.device("cuda:1")]
    assert warmup._reserved_bytes(CPU) == 0


@pytest.mark.parametrize("key, name", [("seconds", "warmup_seconds"), ("within", "steady_within")])
@pytest.mark.parametrize("value", [-1, float("nan"), None, "1"])
def test_other_numbers(warm, key, name, value):
    with pytest.raises(ValueError, match=f"{name}: got .*; allowed: a number >= 0"):
        warm([], **{key: value})

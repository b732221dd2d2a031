"""Turns, ratios and what is left out, in time that the test counts."""

import gc
import itertools
import json
import statistics

import pytest
import torch

from stackwise.benchmark import Workload
from stackwise.benchmark.timing import interleaved, measurement
from stackwise.benchmark.timing.gpu_state import GpuState
from stackwise.benchmark.timing.interleaved import Interleaved, interleave

FREE, THROTTLED = GpuState(1980, 2619, 40, 300.0, ()), GpuState(1400, 2619, 90, 300.0, ("power cap",))


@pytest.fixture(autouse=True)
def _quick(virtual_time, monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda *generation: 0)


@pytest.fixture
def watched(virtual_time):
    """Workloads by name, and the calls that were made, as (name, seconds)."""
    calls = []

    def make(**durations):
        def workload(name, seconds):
            seconds = itertools.repeat(seconds) if isinstance(seconds, float) else iter(seconds)

            def call():
                calls.append(name)
                virtual_time.take(next(seconds))

            return Workload(name, call, torch.device("cpu"), tokens=10)

        return {name: workload(name, seconds) for name, seconds in durations.items()}

    return make, calls


def sensor(monkeypatch, readings):
    readings = iter(readings)
    fake = type("Sensor", (), {"note": None, "read": lambda self: next(readings)})()
    monkeypatch.setattr(interleaved, "GpuSensor", lambda device: fake)


def test_times_and_their_ratio(watched):
    make, _ = watched
    found = interleave(make(slow=0.3, fast=0.1), rounds=8)
    assert found.n_rounds == 8
    assert found.measurements["slow"].seconds == pytest.approx([0.3] * 8)
    assert found.rounds["fast"] == pytest.approx([0.1] * 8)
    assert found.measurements["slow"].tokens_per_second == pytest.approx(10 / 0.3)
    assert found.measurements["fast"].warmup.steady
    assert found.measurements["fast"].peak_memory_bytes is None, "both are in one memory"
    ratio, speed_up = found.ratio("fast", "slow"), found.speed_up("fast", "slow")
    assert (ratio.median, ratio.low, ratio.high, ratio.rounds) == (*[pytest.approx(1 / 3)] * 3, 8)
    assert (speed_up.median, speed_up.rounds) == (pytest.approx(3.0), 8)
    assert not found.inconclusive
    stored = json.loads(json.dumps(found.to_dict()))
    assert stored["measurements"]["slow"]["median_seconds"] == pytest.approx(0.3)
    assert (stored["n_rounds"], stored["discarded"], stored["inconclusive"]) == (8, [], False)
    assert json.loads(json.dumps(ratio.to_dict()))["rounds"] == 8


def test_round_runs_each_workload_once_in_balanced_order(watched):
    make, calls = watched
    found = interleave(make(a=1.0, b=1.0, c=1.0), rounds=20)
    turns = calls[3 * 6 :][: 3 * 20]
    rounds = [tuple(turns[n : n + 3]) for n in range(0, 60, 3)]
    assert all(set(each) == {"a", "b", "c"} for each in rounds)
    assert all(second == first[::-1] for first, second in zip(rounds[::2], rounds[1::2], strict=True))
    for x, y in itertools.combinations("abc", 2):
        assert sum(each.index(x) < each.index(y) for each in rounds) == 10
    assert len(set(rounds)) > 2, "it is not always the same"
    assert len(calls) == 3 * 6 + 60
    assert all(len(each.seconds) == 20 for each in found.measurements.values())


def test_the_order_comes_from_the_seed(watched):
    make, calls = watched
    orders = []
    for seed in (1, 1, 2):
        calls.clear()
        interleave(make(a=1.0, b=1.0, c=1.0, d=1.0), rounds=10, seed=seed)
        orders.append(list(calls))
    assert orders[0] == orders[1] != orders[2]


def test_a_machine_that_slows_down_slows_both(watched):
    """Measured one after the other, what comes later seems slower by half; in turns it does not."""
    make, _ = watched
    slower = [1.0] * 6 + [1.0 + 0.05 * n for n in range(20)]
    found = interleave(make(a=slower, b=slower), rounds=20)
    assert found.ratio("b", "a").median == pytest.approx(1.0)
    one_after_the_other = statistics.median(slower[16:26]) / statistics.median(slower[6:16])
    assert one_after_the_other > 1.3


def test_short_calls_fill_a_turn_behind_one_that_is_not_timed(watched):
    """It would find the caches that another has left."""
    make, calls = watched
    warm_up = [0.0041] * 6
    turn = [9.0, *[0.0041] * 5]
    found = interleave(make(a=itertools.chain(warm_up, turn * 4), b=1.0), rounds=4)
    assert found.measurements["a"].seconds == pytest.approx([0.0041] * 20)
    assert calls.count("a") == 6 + 4 * 6


def test_a_round_is_the_median_of_its_turn(watched):
    make, _ = watched
    turns = [[0.0041, 0.01, 0.02, 0.02, 0.02, 0.09], [0.0041, 0.01, 0.03, 0.03, 0.05, 0.09]]
    found = interleave(make(a=itertools.chain([0.0041] * 6, *turns)), rounds=2)
    assert found.rounds["a"] == pytest.approx((0.02, 0.03))
    assert found.measurements["a"].seconds == pytest.approx(turns[0][1:] + turns[1][1:])


def test_a_cold_cache_needs_no_call_before(watched, monkeypatch):
    make, calls = watched
    monkeypatch.setattr(measurement, "CacheFlush", lambda device: lambda: calls.append("flush"))
    found = interleave(make(a=0.0041), rounds=2, cache="cold")
    assert found.measurements["a"].cache == "cold"
    assert calls == ["flush", "a"] * (6 + 2 * 5)


def test_a_throttled_round_counts_for_none(watched, monkeypatch):
    make, _ = watched
    # Three readings a round: before both turns, between them and after. In the second it is only between.
    sensor(monkeypatch, [*[FREE] * 3, FREE, THROTTLED, FREE, *[FREE] * 3 * 4])
    found = interleave(make(a=[*[1.0] * 6, 1.0, 7.0, 1.0, 1.0, 1.0, 1.0], b=1.0), rounds=6)
    assert found.discarded == (1,)
    assert found.rounds == {"a": pytest.approx((1.0,) * 5), "b": pytest.approx((1.0,) * 5)}
    assert [len(each.seconds) for each in found.measurements.values()] == [5, 5]
    assert found.ratio("a", "b").rounds == 5
    assert not found.inconclusive
    assert found.measurements["a"].throttled, "the states are those of all rounds"


def test_too_many_throttled_rounds_are_inconclusive(watched, monkeypatch):
    make, _ = watched
    sensor(monkeypatch, [*[THROTTLED] * 4, *[FREE] * 6])
    found = interleave(make(a=1.0), rounds=5)
    assert found.discarded == (0, 1)
    assert found.inconclusive


def test_nothing_but_throttled_rounds(watched, monkeypatch):
    make, _ = watched
    sensor(monkeypatch, itertools.repeat(THROTTLED))
    found = interleave(make(a=1.0, b=2.0), rounds=3)
    assert found.inconclusive
    assert found.discarded == (0, 1, 2)
    assert found.rounds == {"a": (), "b": ()}
    ratio = found.ratio("a", "b")
    assert (ratio.median, ratio.low, ratio.high, ratio.rounds) == (None, None, None, 0)
    # The times of a throttled GPU are told, as such.
    measured = found.measurements["b"]
    assert measured.seconds == pytest.approx((2.0,) * 3)
    assert measured.throttled
    assert measured.notes[-1].startswith(
        "throttled: the GPU's clocks were held down in each of 3 rounds (power cap); these are the times"
    )
    assert json.loads(json.dumps(found.to_dict()))["inconclusive"] is True


@pytest.mark.parametrize("discarded, inconclusive", [(0, False), (2, False), (3, True)])
def test_a_fifth_may_be_discarded(discarded, inconclusive):
    assert Interleaved({}, {}, 10, tuple(range(discarded))).inconclusive is inconclusive


def test_few_rounds_have_no_interval(watched):
    make, _ = watched
    ratio = interleave(make(a=1.0, b=2.0), rounds=2).ratio("a", "b")
    assert (ratio.median, ratio.low, ratio.high) == (pytest.approx(0.5), None, None)


def test_ratios_are_taken_within_a_round():
    found = Interleaved({}, {"a": (1.0, 2.0, 30.0), "b": (1.0, 4.0, 10.0)}, 3)
    # 1, 0.5 and 3; the ratio of the medians would be 0.5.
    assert found.ratio("a", "b").median == 1.0
    assert found.speed_up("a", "b").median == 1.0


def test_names_that_were_not_measured():
    found = Interleaved({}, {"a": (1.0,), "b": (1.0,)}, 1)
    with pytest.raises(ValueError, match="name: got 'x'; allowed: 'a', 'b'"):
        found.ratio("x", "a")
    with pytest.raises(ValueError, match="baseline: got 'x'; allowed: 'a', 'b'"):
        found.ratio("a", "x")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rounds": 0}, "rounds: got 0; allowed: an integer >= 1"),
        ({"turn_seconds": 0}, "turn_seconds: got 0; allowed: a number > 0"),
        ({"cache": "hot"}, "cache: got 'hot'"),
        ({"clock": "device"}, "clock: got 'device'; allowed: 'host' on cpu"),
    ],
)
def test_other_options(watched, options, message):
    make, calls = watched
    with pytest.raises(ValueError, match=message):
        interleave(make(a=1.0), **options)
    assert not calls


def test_no_workloads():
    with pytest.raises(ValueError, match=r"workloads: got \{\}; allowed: one or more, by name"):
        interleave({})


def test_workloads_on_two_devices(watched):
    make, _ = watched
    both = make(a=1.0) | {"b": Workload("b", lambda: None, torch.device("cuda"))}
    with pytest.raises(ValueError, match=r"workloads: got \['cpu', 'cuda'\]; allowed: all of them on one"):
        interleave(both)

import math

import pytest

from stackwise.gate.limit import METRICS, Limit, Limits, parse_limits, parse_share


@pytest.mark.parametrize(("text", "share"), [("2%", 0.02), ("0.5%", 0.005), ("12.5 %", 0.125), ("100%", 1.0)])
def test_a_share(text, share):
    assert parse_share("time", text) == share


@pytest.mark.parametrize(
    "value", ["2", 2, 0.02, "0%", "-1%", "1001%", "2%%", "", None, "\uff11%", True], ids=repr
)
def test_what_is_no_share_is_refused(value):
    with pytest.raises(ValueError, match=r"time: got .*; allowed: a string such as '2%'"):
        parse_share("time", value)


def test_a_limit_is_in_logarithms_at_its_level():
    assert Limit().at(1e-3) == pytest.approx((math.log(1.02), math.log(1.01)))
    assert Limit(0.1, 0.01).at(1e-3) == pytest.approx((math.log(1.1), math.log(1.01)))


def test_the_minimum_effect_is_half_the_tolerance():
    assert Limit(0.1).at(1.0) == pytest.approx((math.log(1.1), math.log(1.05)))


def test_a_floor_takes_the_place_of_a_tolerance_that_is_less():
    limit = Limit(0.02, 0.01, floor=50e-6)
    assert limit.at(1.0) == pytest.approx((math.log(1.02), math.log(1.01)))
    # 50 us of 500 us are 10 %, five times the tolerance.
    assert limit.at(500e-6) == pytest.approx((math.log(1.1), math.log(1.05)))
    assert limit.at(None) == pytest.approx((math.log(1.02), math.log(1.01)))  # nothing was measured


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"tolerance": 0.0}, "tolerance"),
        ({"tolerance": math.inf}, "tolerance"),
        ({"minimum_effect": 0.03}, "minimum_effect"),
        ({"minimum_effect": -0.01}, "minimum_effect"),
        ({"floor": -1.0}, "floor"),
    ],
    ids=["no tolerance", "infinite", "effect above tolerance", "negative effect", "negative floor"],
)
def test_a_limit_that_makes_no_sense_is_refused(given, key):
    with pytest.raises(ValueError, match=f"{key}: got"):
        Limit(**given)


@pytest.mark.parametrize("level", [0.0, -1.0, math.nan], ids=repr)
def test_a_level_is_above_0(level):
    with pytest.raises(ValueError, match="base_level: got"):
        Limit().at(level)


def test_each_metric_has_a_limit():
    assert METRICS == ("time", "memory", "ttft", "tpot")
    assert [Limits().of(metric).tolerance for metric in METRICS] == [0.02, 0.01, 0.05, 0.02]
    with pytest.raises(ValueError, match="metric: got 'speed'"):
        Limits().of("speed")


def test_a_marker_changes_what_it_names():
    limits = Limits().changed(time="5%", memory=None, floor="50us")
    assert limits == Limits(
        time=Limit(0.05, floor=5e-5),
        memory=None,
        ttft=Limit(0.05, floor=5e-5),
        tpot=Limit(0.02, floor=5e-5),
    )


def test_a_marker_over_a_default_keeps_its_floor():
    defaults = Limits().changed(floor="1ms", memory_floor=4096)
    limits = defaults.changed(time="5%", memory="3%")
    assert limits.time == Limit(0.05, floor=1e-3)
    assert limits.memory == Limit(0.03, floor=4096.0)


def test_what_was_switched_off_is_switched_on_again():
    assert Limits(memory=None).changed(memory="3%").memory.tolerance == 0.03


def test_an_unknown_key_is_refused():
    with pytest.raises(ValueError, match="gate: got 'speed'; allowed: time, memory, ttft, tpot, floor"):
        Limits().changed(speed="2%")
    with pytest.raises(ValueError, match="memory: got '1'"):
        Limits().changed(memory="1")


def test_a_floor_that_is_none_stays_as_it_is():
    limits = Limits().changed(floor="1ms", memory_floor=4096)
    assert limits.changed(floor=None, memory_floor=None) == limits


@pytest.mark.parametrize(("value", "floor"), [("1 MiB", 2**20), ("0 B", 0), (4096, 4096), (0, 0)])
def test_a_floor_of_memory(value, floor):
    assert Limits().changed(memory_floor=value).memory == Limit(0.01, floor=floor)


@pytest.mark.parametrize("value", ["65536", "1 mb", -1, 0.5, math.nan], ids=repr)
def test_what_is_no_floor_of_memory_is_refused(value):
    with pytest.raises(ValueError, match=r"memory_floor: got .*; allowed: a string such as '2 GiB'"):
        Limits().changed(memory_floor=value)


def test_limits_on_the_command_line():
    given = parse_limits("time=3%, ttft=none,floor = 50us, memory_floor=1MiB")
    assert given == {"time": "3%", "ttft": None, "floor": "50us", "memory_floor": "1MiB"}
    limits = Limits().changed(**given)
    assert (limits.time, limits.ttft) == (Limit(0.03, floor=5e-5), None)
    assert limits.memory == Limit(0.01, floor=2**20)


@pytest.mark.parametrize("text", ["", "time", "=2%", "time=2%,", "time=2%,time=3%"], ids=repr)
def test_limits_that_are_not_understood_are_refused(text):
    with pytest.raises(ValueError, match=r"limits: got .*; allowed: KEY=VALUE, by commas, each key once"):
        parse_limits(text)


def test_a_metric_that_is_judged_again_has_its_own_floor():
    none = Limits().changed(memory=None, time=None)
    again = none.changed(memory="2%", time="3%")
    assert (again.memory.tolerance, again.memory.floor) == (0.02, Limits().memory.floor)
    assert (again.time.tolerance, again.time.floor) == (0.03, 0.0)

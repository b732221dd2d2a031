"""How much is added to a call, found by processor time, and counted in instructions."""

import math
import random
import shutil

import pytest

from bench.gate import effects
from bench.gate.effects import EFFECTS, SAME, Effect, branches, calibrate, count_instructions, worst_deviation
from bench.isolated import Ended


class Clock:
    """Clock that advances by one microsecond for each step of a call, and by the seconds of a sleep."""

    def __init__(self):
        self.on_cpu = self.asleep = 0.0

    def step(self, count):
        self.on_cpu += 1e-6 * count

    def sleep(self, seconds):
        self.asleep += seconds

    def thread_time(self):
        return self.on_cpu

    def perf_counter(self):
        return self.on_cpu + self.asleep


def test_calibrate_finds_iterations_and_sleep_of_each_effect(monkeypatch):
    """A call has 20 000 steps: a tenth is 2000 more, and a sleep of 5 % is 1 ms."""
    clock = Clock()

    def timed(call, timer=None):
        read = clock.thread_time if timer == clock.thread_time else clock.perf_counter
        begin = read()
        call()
        return read() - begin

    monkeypatch.setattr(effects, "time", clock)
    monkeypatch.setattr(effects, "_timed", timed)
    monkeypatch.setattr(effects, "isolated", lambda function, seconds: Ended(list(function()), None, 0.0))
    work = "bench.gate.suite.subject.work.prepare"
    monkeypatch.setattr(work, lambda name: lambda added: clock.step(20_000 + added))
    found = calibrate("python", 0.05)
    assert found["seconds"] == pytest.approx(0.02)
    assert found["iteration_share"] == pytest.approx(1 / 20_000)
    iterations = {branch: each["iterations"] for branch, each in found["effects"].items()}
    assert iterations == {SAME: 0, "up01": 200, "up02": 400, "up05": 1000, "up10": 2000, "wait": 0}
    for branch, effect in EFFECTS.items():
        each = found["effects"][branch]
        assert each["sleep_seconds"] == pytest.approx(1e-3 if effect.sleeps else 0.0)
        assert each["change"] == pytest.approx(effect.share)
        assert each["on_cpu"] == pytest.approx(0.0 if effect.sleeps else effect.share, abs=1e-9)
        assert each["low"] <= each["change"] <= each["high"]


def test_a_call_that_fails_is_told():
    with pytest.raises(RuntimeError, match="nothing: KeyError"):
        calibrate("nothing", 0.01)


def test_ratios_are_of_pairs_whose_first_alternates():
    made = []
    moments = iter(float(i * i) for i in range(1000))

    def timer():
        return next(moments)

    effects._ratios(lambda: made.append("plain"), lambda: made.append("other"), 0.0, timer)
    assert made[:8] == ["plain", "other", "other", "plain"] * 2
    assert made.count("plain") == made.count("other") == 16


def test_a_change_is_not_that_of_the_order(monkeypatch):
    """The second of a pair takes half as long again, whichever it is; the other a tenth longer by itself."""
    pairs = [1.1 * 1.5, 1.1 / 1.5] * 20
    pairs[4] *= 9
    monkeypatch.setattr(effects, "_ratios", lambda *_: pairs)
    found = effects._change(list, list, 0.0)
    assert found == pytest.approx((0.1, 0.1, 0.1))


def test_the_interval_of_a_change_is_that_of_both_orders(monkeypatch):
    chance = random.Random(7)
    hits = 0
    for _ in range(200):
        pairs = [math.exp(chance.gauss(0.05 + 0.1 * (i % 2 - 0.5), 0.02)) for i in range(60)]
        monkeypatch.setattr(effects, "_ratios", lambda *_, pairs=pairs: pairs)
        _, low, high = effects._change(list, list, 0.0)
        hits += low <= math.expm1(0.05) <= high
    assert hits >= 185


def test_a_sleep_is_asked_for_shorter_by_what_it_is_late(monkeypatch):
    clock = [0.0]

    def sleep(seconds):
        clock[0] += seconds + 60e-6

    monkeypatch.setattr(effects.time, "sleep", sleep)
    monkeypatch.setattr(effects, "_timed", lambda call: (call(), 1.6e-4)[1])
    assert effects._sleep_seconds(1e-4) == pytest.approx(4e-5)
    assert effects._sleep_seconds(3e-5) == 1e-6


def test_without_callgrind_nothing_is_counted(monkeypatch):
    monkeypatch.setattr(effects.shutil, "which", lambda name: None)
    assert count_instructions("python", 10) is None


def test_what_a_start_takes_is_in_no_share(monkeypatch):
    # 1 000 000 to start, 500 a call, 3 an iteration.
    monkeypatch.setattr(effects.shutil, "which", lambda name: "/bin/valgrind")
    monkeypatch.setattr(
        effects, "_instructions", lambda name, calls, added: 10**6 + calls * (500 + 3 * added)
    )
    assert count_instructions("gemm", 10) == {"call": 500.0, "added": 30.0, "share": 0.06}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
def test_instructions_of_pure_python():
    """2 000 steps more of 20 000 are a tenth more instructions."""
    found = count_instructions("python", 2000)
    assert found["share"] == pytest.approx(0.1, rel=0.02)


def test_branches_add_what_was_calibrated():
    def of(branch, effect):
        return {
            "iterations": 0 if effect.sleeps else round(1000 * effect.share),
            "sleep_seconds": 0.01 if effect.sleeps else 0.0,
            "change": effect.share,
        }

    found = {"gemm": {"effects": {branch: of(branch, effect) for branch, effect in EFFECTS.items()}}}
    made = branches(found)
    assert made["up02"].iterations == {"gemm": 20}
    assert made["up02"].sleep_seconds == {}
    assert made["wait"].sleep_seconds == {"gemm": 0.01}
    assert made[SAME].iterations == {"gemm": 0}
    assert worst_deviation(found) == 0.0
    found["gemm"]["effects"]["up05"]["change"] = 0.06
    assert worst_deviation(found) == pytest.approx(0.2)


def test_names_of_effects():
    assert [str(effect) for effect in EFFECTS.values()] == [
        "A/A",
        "1%",
        "2%",
        "5%",
        "10%",
        "5% of sleep",
    ]
    assert str(Effect(0.02)) == "2%"

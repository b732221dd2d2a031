"""The first unstable length: every place of a small range, planted mechanisms, chance, and no memory."""

import itertools
import math

import pytest
import torch
from torch import nn

from bench.planted_lengths import PLANTED, half_sum, planted_spec, untrained_positions, window_rack
from stackwise.stability.lengths import first_unstable_length
from stackwise.stability.lengths.probe import LengthProbe
from stackwise.subject.spec import ModelSpec

SLOW = pytest.mark.slow
QUICK = {"seeds": 1, "steps": 1}
SHORT = "divergence is not judged: it takes 8 steps, and got 1"  # of what is in no other trouble


class Length(nn.Module):
    """A model of one weight, to which `at` says what becomes of its logits at a length in training."""

    def __init__(self, at):
        super().__init__()
        self.scale, self.at = nn.Parameter(torch.ones(7)), at

    def forward(self, ids):
        out = self.scale.expand(*ids.shape, 7)
        return out * self.at(ids.shape[1]) if self.training else out


def spec(at, **declared):
    return ModelSpec.of(lambda: Length(at), name="known", causal=True, width=7, inputs="tokens", **declared)


def nan_where(holds):
    return spec(lambda length: math.nan if holds(length) else 1.0)


def looked_at(limit, low, high, step):
    """The lengths that a bisection by hand looks at, in order, when all from `limit` on are unstable."""
    bad, good, order = high, low, [low, high]
    if limit <= low:
        return [low]
    if limit > high:
        return order
    while bad - good > step:
        middle = good + (bad - good) // (2 * step) * step
        order.append(middle)
        bad, good = (middle, good) if middle >= limit else (bad, middle)
    return order


@pytest.mark.parametrize("planted", range(4, 15))
def test_every_length_of_a_range(planted):
    found = first_unstable_length(nan_where(lambda n: n >= planted), 4, 13, **QUICK)
    first = planted if planted <= 13 else None
    assert found.first == first
    assert found.verdict == ("stable" if first is None else "unstable at low" if planted == 4 else "found")
    assert found.stable_up_to == (None if planted == 4 else planted - 1)
    order = looked_at(planted, 4, 13, 1)
    assert list(found.order[: len(order)]) == order
    # Behind it the two around the find, with fresh seeds.
    assert sorted(found.order[len(order) :]) == [n for n in (planted - 1, planted) if n >= 4 and first]
    assert found.notes == ([] if planted == 4 else [SHORT])


@pytest.mark.parametrize("planted", [7, 18, 19, 27, 28, 34, 35])
def test_a_coarse_step_finds_the_first_of_its_lengths(planted):
    found = first_unstable_length(nan_where(lambda n: n >= planted), 8, 35, step=9, **QUICK)
    lengths = [8, 17, 26, 35]
    assert found.first == next(n for n in lengths if n >= planted)
    assert all(point.seq_len in lengths for point in found.points)


def test_few_lengths_are_looked_at():
    found = first_unstable_length(nan_where(lambda n: n >= 777), 2, 1026, **QUICK, batch_size=1)
    assert found.first == 777
    assert len(found.order) == 2 + math.log2(1024) + 2
    assert len(found.points) == 2 + math.log2(1024)


@pytest.mark.parametrize("mechanism", PLANTED)
@pytest.mark.parametrize(
    "planted, high", [(19, 24), pytest.param(23, 64, marks=SLOW), pytest.param(60, 64, marks=SLOW)]
)
def test_planted_mechanism_is_found_exactly(mechanism, planted, high):
    found = first_unstable_length(
        planted_spec(mechanism, planted), 16, high, tokens_per_step=64, seeds=2, steps=5
    )
    assert (found.first, found.verdict) == (planted, "found")
    assert found.stable_up_to == planted - 1
    for length in (planted - 1, planted):
        assert len(found.point(length).runs) == 4
    kinds = {trouble.kind for each in found.point(planted).runs for trouble in each.instabilities}
    assert kinds <= ({"gradient growth", "spike"} if mechanism == "growing logits" else {"non-finite"})
    assert f"unstable from {planted} on" in repr(found)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", PLANTED)
def test_planted_mechanism_is_found_among_long_lengths(mechanism):
    found = first_unstable_length(planted_spec(mechanism, 640), 64, 1024, tokens_per_step=1024, steps=10)
    assert (found.first, found.verdict) == (640, "found")


CLEAN = {
    "positions": lambda: untrained_positions(23, beyond=0.0),
    "float32 sum": lambda: half_sum(23, kept_in=torch.float32),
}
HEALTHY = {
    "mha": {"window": None},
    "gqa": {"window": None, "n_kv_heads": 1, "attention_type": "mqa"},
    "mla": {"window": None, "attention_type": "mla"},
    "window": {"window": 16},
    "kernel": {"window": None, "attention_type": "kernel"},
}


@pytest.mark.parametrize("name", [*CLEAN, *HEALTHY])
def test_nothing_is_found_where_nothing_is(name):
    make = CLEAN.get(name) or (lambda: window_rack(**HEALTHY[name]))
    clean = ModelSpec.of(make, name=name, causal=True)
    found = first_unstable_length(clean, 16, 32, tokens_per_step=64, seeds=2, steps=6)
    assert (found.first, found.verdict, found.stable_up_to) == (None, "stable", 32)
    assert [point.verdict for point in found.points] == ["stable", "stable"]
    assert str(found).startswith(f"{name}: stable up to 32\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found_in_healthy_attention_up_to_1024(name):
    healthy = ModelSpec.of(lambda: window_rack(**HEALTHY[name]), name=name, causal=True)
    found = first_unstable_length(healthy, 64, 1024, tokens_per_step=1024, steps=16)
    assert (found.first, found.verdict) == (None, "stable")


class Chancy(nn.Module):
    """At each length another list of what becomes of the seeds, in the order in which they are trained."""

    def __init__(self, fates):
        super().__init__()
        self.scale, self.fates = nn.Parameter(torch.randn(7)), fates
        self.spoilt, self.calls = None, 0

    def forward(self, ids):
        if not self.training:
            return self.scale.expand(*ids.shape, 7)
        if self.spoilt is None:
            self.spoilt = next(self.fates[ids.shape[1]])
        self.calls += 1
        # After five sound steps a gradient that is far above them.
        return self.scale.expand(*ids.shape, 7) * (1e4 if self.spoilt and self.calls > 5 else 1.0)


def chancy(fates):
    """Fates of the seeds by length, True: a spike; those not told are sound."""
    fates = {
        length: itertools.chain(fates.get(length, ()), itertools.repeat(False)) for length in range(2, 33)
    }
    return ModelSpec.of(lambda: Chancy(fates), name="chancy", causal=True, width=7, inputs="tokens")


BAD, SOUND = [True] * 6, []


@pytest.mark.parametrize(
    ("fates", "first", "noted"),
    [
        # All from 10 on.
        (dict.fromkeys(range(10, 13), BAD), 10, []),
        # One seed of three is a chance, which is told.
        ({12: [True, False, False]}, None, ["T=12: spiky"]),
        ({12: BAD, 11: [False, True, False]}, 12, ["T=11: spiky"]),
        # Two of three, and none of the fresh ones: the find does not hold, and the search goes on above it.
        ({12: BAD, 11: BAD, 10: [True, True, False]}, 11, ["T=10: spiky"]),
        # One of three, and all of the fresh ones: the length below the find is no stable one.
        ({12: BAD, 11: BAD, 10: BAD, 9: [True, False, False, True, True, True]}, 9, []),
        # What was seen as unstable at the shortest length was chance: the longest is looked at after all.
        ({8: [True, True, False], 12: BAD}, 12, ["T=8: spiky"]),
    ],
)
def test_chance_is_told_from_what_holds(fates, first, noted):
    found = first_unstable_length(chancy(fates), 8, 12, seeds=3, steps=8, memory=False)
    assert found.first == first
    assert [note.partition(": training")[0] for note in found.notes] == noted


class Growing(Chancy):
    """Longer ones than 8 have gradients that are far above its own."""

    def forward(self, ids):
        return super().forward(ids) * (100.0 if ids.shape[1] > 8 else 1.0)


@pytest.mark.parametrize("seeds, judged", [((0,), False), ((0, 1), True)], ids=["in trouble", "one is sound"])
def test_second_test_of_shortest_length_may_provide_the_baseline(seeds, judged):
    fates = {8: iter([True, False]), 12: iter([False])}
    growing = ModelSpec.of(lambda: Growing(fates), name="growing", causal=True, width=7, inputs="tokens")
    probe = LengthProbe(growing, 12, memory=False, arguments={"steps": 8})
    for seed in seeds:
        probe.look(8, (seed,))
    kinds = {trouble.kind for each in probe.look(12, (2,)).runs for trouble in each.instabilities}
    assert ("gradient growth" in kinds) == judged


def test_longer_length_that_is_stable_is_noted():
    found = first_unstable_length(nan_where(lambda n: n in (8, 16)), 4, 16, **QUICK)
    # 4 is good and 16 bad; 10 and 13 to 15 are good.
    assert found.first == 16
    assert found.notes == [SHORT]
    found = first_unstable_length(nan_where(lambda n: n in (4, 10)), 4, 16, step=6, **QUICK)
    assert (found.first, found.verdict) == (4, "unstable at low")


def test_memory_that_does_not_last_is_no_instability():
    def at(length):
        if length >= 11:
            raise torch.OutOfMemoryError("tried to allocate")
        return 1.0

    found = first_unstable_length(spec(at, seq_len=4), 4, 16, **QUICK)
    assert (found.first, found.verdict, found.stable_up_to) == (None, "out of memory", 10)
    assert str(found).startswith("known: stable up to 10; out of memory at 11\n")
    assert [point.seq_len for point in found.points if point.stopped] == [11, 13, 16]
    nothing = first_unstable_length(spec(at, seq_len=4), 12, 16, **QUICK)
    assert (nothing.first, nothing.verdict, nothing.stable_up_to) == (None, "out of memory", None)
    assert "nothing could be run; out of memory at 12" in repr(nothing)


def test_instability_below_what_memory_lasts_for_is_found():
    def at(length):
        if length >= 14:
            raise MemoryError
        return math.nan if length >= 7 else 1.0

    found = first_unstable_length(spec(at, seq_len=4), 4, 16, **QUICK)
    assert (found.first, found.verdict) == (7, "found")
    assert "T=16: out of memory" in found.notes


@pytest.mark.parametrize("full", [6, 7], ids=["below the find", "at the find"])
def test_memory_that_does_not_last_for_fresh_seeds_leaves_the_find(full):
    seen = []

    def at(length):
        if length == full and seen.count(length) >= 1:
            raise torch.OutOfMemoryError("tried to allocate")
        return math.nan if length >= 7 else 1.0

    found = first_unstable_length(spec(at), 4, 8, **QUICK, on_point=lambda point: seen.append(point.seq_len))
    assert (found.first, found.verdict, found.stable_up_to) == (7, "found", 6)
    assert found.notes == [f"T={full}: out of memory with fresh seeds: not confirmed", SHORT]
    assert {point.seq_len: len(point.runs) for point in found.points} == {4: 1, 6: 1, 7: 1, 8: 1} | {
        13 - full: 2
    }
    assert list(found.order) == seen == [4, 8, 6, 7, 7, 6]


def test_fresh_seeds_are_others():
    seen = []
    found = first_unstable_length(
        nan_where(lambda n: n >= 6), 4, 8, seeds=[1, 2], fresh_seeds=[5], steps=1, on_point=seen.append
    )
    seeds = {point.seq_len: [each.seed for each in point.runs] for point in found.points}
    assert seeds == {4: [1, 2], 5: [1, 2, 5], 6: [1, 2, 5], 8: [1, 2]}
    assert [point.seq_len for point in seen] == list(found.order)
    with pytest.raises(ValueError, match="seq_len: got 7; allowed: one that was looked at: 4, 5, 6, 8"):
        found.point(7)
    plain = found.to_dict()
    assert (plain["first"], plain["stable_up_to"], plain["verdict"]) == (6, 5, "found")
    assert [point["seq_len"] for point in plain["points"]] == [4, 5, 6, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"low": 1}, "low: got 1; allowed: an integer >= 2"),
        ({"high": 4}, "high: got 4; allowed: an integer >= 5"),
        ({"step": 0}, "step: got 0"),
        ({"step": 5}, "step: got 5; allowed: a divisor of high - low, 12"),
        ({"seeds": 0}, "seeds: got 0"),
        ({"seeds": []}, r"seeds: got \(\); allowed: at least one"),
        ({"seeds": [3, 3]}, r"seeds: got \(3, 3\); allowed: distinct seeds"),
        ({"seeds": [3], "fresh_seeds": [3]}, r"fresh_seeds: got \[3\]; allowed: other ones than seeds"),
        (
            {"tokens_per_step": 15},
            "tokens_per_step: got 15; allowed: at least one row of the longest .* 16",
        ),
        ({"tokens_per_step": 16, "batch_size": 2}, "batch_size: got 2; allowed: None with tokens_per_step"),
        ({"gradient_factor": 1.0}, "gradient_factor: got 1.0"),
        ({"loss_tolerance": -1.0}, "loss_tolerance: got -1.0"),
    ],
)
def test_what_is_refused(arguments, message):
    arguments = {"low": 4, "high": 16} | arguments
    with pytest.raises(ValueError, match=message):
        first_unstable_length(nan_where(lambda _: False), **arguments)


def test_length_that_the_model_does_not_take_is_refused_at_once():
    short = spec(lambda _: pytest.fail("nothing is to be run"), max_length=12)
    with pytest.raises(ValueError, match="seq_len: got 16; known takes at most 12 positions"):
        first_unstable_length(short, 4, 16)

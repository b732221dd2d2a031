"""What the gate is without its parts, on sides whose times are known."""

import random
from types import SimpleNamespace

import numpy as np
import pytest

from bench.gate import ablation
from bench.gate.ablation import DESIGNS, Side, both_sides, difference, judge, series
from bench.gate.repository import BASE, Added, Repository


class Made:
    """A side on a machine that becomes slower with each call, or favours who is first in a pair."""

    def __init__(self, factor, clock, *, drift=0.0, first=0.0):
        self.factor, self.clock, self.drift, self.first = factor, clock, drift, first

    def seconds(self, name, calls):
        self.clock.append(self)
        number = len(self.clock)
        is_first = number % 2 == 1
        return 1e-2 * self.factor * (1 + self.drift * number) * (1 - self.first if is_first else 1.0)


def sides(**machine):
    clock = []
    return (Made(1.0, clock, **machine), Made(1.05, clock, **machine))


@pytest.mark.parametrize("design", DESIGNS)
def test_an_effect_is_seen_by_each(design):
    assert difference(sides(), "gemm", design, random.Random(0)) == pytest.approx(np.log(1.05))


def test_a_drift_is_seen_only_one_after_the_other():
    drifting = {"drift": 0.01}
    found = {d: difference(sides(**drifting), "gemm", d, random.Random(1)) - np.log(1.05) for d in DESIGNS}
    assert abs(found["in turns"]) < 0.01
    assert abs(found["one after the other"]) > 0.1


def test_who_is_first_is_seen_only_in_a_fixed_order():
    found = {d: difference(sides(first=0.02), "gemm", d, random.Random(1)) - np.log(1.05) for d in DESIGNS}
    assert found["in turns"] == pytest.approx(0.0)
    assert found["fixed order"] == pytest.approx(-np.log(0.98))


def test_all_make_as_many_calls():
    counts = set()
    for design in DESIGNS:
        pair = sides()
        difference(pair, "gemm", design, random.Random(0))
        counts.add(len(pair[0].clock))
    assert len(counts) == 1


def test_judged_by_the_rule_of_the_gate():
    rng = np.random.default_rng(0)
    quiet = judge(rng.normal(0.0, 0.002, 200))
    assert quiet["spread"] == pytest.approx(0.002, rel=0.2)
    assert quiet["regressed"]["hits"] == 0
    assert quiet["inconclusive"]["hits"] == 0
    assert quiet["regressed"]["n"] >= 200 // 13
    biased = judge(rng.normal(0.05, 0.002, 200))
    assert biased["bias"] == pytest.approx(0.05, abs=0.001)
    assert biased["flagged"]["value"] == biased["regressed"]["value"] == 1.0
    noisy = judge(rng.normal(0.0, 0.2, 200))
    assert noisy["inconclusive"]["value"] > 0.5


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate") / "repository"
    return Repository.create(folder, {"same": Added()}, ("python",))


@pytest.mark.parametrize("twins", [True, False], ids=["twins", "alone"])
def test_sides_make_calls_of_their_trees(repository, twins):
    with both_sides(repository, random.Random(0), twins=twins) as sides:
        for side in sides:
            assert 0 < side.seconds("python", 1) < 60
            assert 0 < side.seconds("python", 3) < 60


def test_a_side_that_ends_is_told(repository):
    side = Side(repository.tree(BASE))
    with pytest.raises(RuntimeError, match="the process of a side is gone"):
        side.seconds("nothing", 1)
    side.close()


def test_a_series(repository, monkeypatch):
    monkeypatch.setattr(ablation, "_PAIRS", 2)
    monkeypatch.setattr(ablation, "_WARM_UP", 1)
    monkeypatch.setattr(ablation, "ROUNDS", 2)
    found = series(repository, ("python",), "idle", 0)
    assert {design: len(by_name["python"]) for design, by_name in found.items()} == dict.fromkeys(DESIGNS, 2)


def test_processes_are_fresh_but_for_one_design(monkeypatch):
    made, asked = [], []

    class Known:
        def __init__(self, tree, twins=None):
            made.append(self)

        def close(self):
            made.remove(self)

    def note(sides, name, design, rng):
        asked.append((design, name, tuple(map(id, sides))))
        return 0.0

    monkeypatch.setattr(ablation, "Side", Known)
    seeds = []
    monkeypatch.setattr(
        ablation, "Twins", lambda seed, _: seeds.append(seed) or SimpleNamespace(end=lambda: None)
    )
    monkeypatch.setattr(ablation, "difference", note)
    monkeypatch.setattr(ablation, "ROUNDS", 3)

    class Trees:
        def tree(self, branch):
            return branch

    series(Trees(), ("python", "memory"), "idle", 0)
    assert made == []
    assert len(set(seeds)) == 4  # of the pair that is kept, and of each round
    first = list(seeds)
    seeds.clear()
    asked.clear()
    series(Trees(), ("python", "memory"), "idle", 0)
    assert seeds == first
    kept = {sides for design, _, sides in asked if design == "one process"}
    assert len(kept) == 1
    per_round = 2 * len(DESIGNS)
    apart = ("own layouts", "one process")
    for part in (asked[per_round * i : per_round * (i + 1)] for i in range(3)):
        assert sorted(design for design, _, _ in part) == sorted(2 * DESIGNS)
        assert len({sides for design, _, sides in part if design not in apart}) == 1
        assert len({sides for design, _, sides in part if design == "own layouts"}) == 1

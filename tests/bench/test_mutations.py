"""The grammar's models are sound, each of its bugs moves something, and the rates are what was counted."""

import random

import pytest
import torch
from hypothesis import HealthCheck, find, given, settings

from bench.architectures import VOCAB_SIZE, Architecture, Model, architectures, spec_of
from bench.claim import Claim
from bench.mutation_rules import MUTATIONS, Case, cases
from bench.mutations import (
    SelfTest,
    Tally,
    draw_cases,
    measure_mutations,
    moved,
    mutation_bars,
    observe,
    table,
    wilson,
)

QUICK = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LARGE = Architecture(
    depth=2, n_heads=4, n_kv_heads=2, positions="rope", mlp="swiglu", tied=True, qk_norm=True, dropout=0.1
)
PLACED = Architecture(depth=2, n_heads=2, n_kv_heads=2, positions="learned", window=3, norm_position="post")


@QUICK
@given(architectures())
def test_architectures_are_consistent(architecture):
    assert architecture.n_heads % architecture.n_kv_heads == 0
    spec = spec_of(Model, architecture, "clean")
    seen = observe(spec)
    for name, value in seen.items():
        assert value.isfinite().all() or name.startswith("gradient"), name
    # Decoded one by one, padded on either side, as packed documents: what a sound model gives.
    assert torch.allclose(seen["cached"], seen["logits, first call"], atol=1e-12)
    lengths = (12, 9, 7)
    for side in ("right", "left"):
        start = 0
        for row, length in enumerate(lengths):
            part = seen[f"{side}-padded"][start : start + length]
            start += length
            if side == "right":
                assert torch.allclose(part, seen["logits, first call"][row, :length], atol=1e-12)
    assert torch.allclose(seen["packed"][:, :5], seen["logits, first call"][:, :5], atol=1e-12)
    assert seen["loss of nothing"] == 0


def test_architecture_shrinks_to_one_head_in_one_layer():
    smallest = find(architectures(), lambda _: True, settings=settings(QUICK, database=None))
    assert smallest == Architecture()


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_bug_moves_something(name):
    rule = MUTATIONS[name]
    architecture = next(a for a in (LARGE, PLACED) if rule.suits(a))
    for value in rule.values:
        assert moved(Case(name, value, architecture))


def test_what_is_no_bug_moves_nothing():
    for architecture in (LARGE, PLACED, Architecture()):
        one, two = (observe(spec_of(Model, architecture, name)) for name in "ab")
        assert all(torch.equal(one[name].nan_to_num(), two[name].nan_to_num()) for name in one)
    # Relative positions cannot tell where the first token is counted from.
    rule = MUTATIONS["documents_share_positions"]
    assert not rule.suits(LARGE)
    assert not moved(Case(rule.name, None, LARGE))


def test_drawn_cases_are_different_and_move_something():
    found, void = draw_cases(6, number=3)
    assert len(set(found)) == len(found) == 6
    assert not set(found) & set(void)
    assert len({case.mutation for case in found}) >= 4
    again, _ = draw_cases(6, number=3)
    assert again == found


@QUICK
@given(cases())
def test_a_case_fits_its_rule(case):
    assert case.rule.suits(case.architecture)
    assert case.value in case.rule.values
    assert case.mutant().width == VOCAB_SIZE


@pytest.mark.parametrize(
    "hits, n, low, high",
    # Newcombe 1998, Statistics in Medicine 17, 857, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_interval(hits, n, low, high):
    assert wilson(hits, n) == pytest.approx((low, high), abs=1e-4)


def test_interval_of_nothing():
    assert wilson(0, 0) == (0.0, 1.0)


def test_interval_covers():
    draws = random.Random(0)
    covered = 0
    for _ in range(400):
        low, high = wilson(sum(draws.random() < 0.9 for _ in range(50)), 50)
        covered += low <= 0.9 <= high
    assert 0.92 <= covered / 400 <= 0.99


def test_tally():
    tally = Tally()
    for hit, warned in ((True, False), (False, True), (True, True), (False, False)):
        tally.count(hit=hit, warned=warned)
    assert tally.to_dict() == {
        "n": 4,
        "hits": 2,
        "warned": 1,
        "rate": 0.5,
        "interval": list(wilson(2, 4)),
    }


def asking(monkeypatch, checks):
    """Let the self-test ask these checks only."""
    import bench.mutations

    ask = bench.mutations.check_model
    monkeypatch.setattr(bench.mutations, "check_model", lambda spec, suite: ask(spec, checks=checks))


def test_bug_is_found_and_twin_is_not(monkeypatch):
    asking(monkeypatch, ["causality", "determinism"])
    test = SelfTest()
    cases = [Case("mask_ahead", 1, PLACED), Case("tie_broken", None, LARGE), Case("mask_ahead", 2, PLACED)]
    answers = dict(test.ask(cases))
    assert not test.errors
    assert answers == {cases[0]: True, cases[1]: False, cases[2]: True}
    found = test.to_dict()
    assert found["detection"]["all"]["hits"] == 2
    assert found["detection"]["kind: mask"]["rate"] == 1.0
    assert found["detection"]["decidable"]["n"] == 3
    assert found["false_alarms"]["n"] == 2
    assert found["false_alarms"]["hits"] == 0
    assert [row["rule"] for row in found["missed"]] == ["tie_broken"]
    assert found["caught_by"] == {"causality": 2}
    lines = list(table(test))
    assert any(line.startswith("kind: mask") and "2 of    2" in line for line in lines)


def test_false_alarm_is_counted(monkeypatch):
    """Of a twin that is none: it leaks as its mutant does."""
    asking(monkeypatch, ["causality"])
    case = Case("mask_ahead", 1, PLACED)
    monkeypatch.setattr(Case, "twin", Case.mutant)
    test = SelfTest()
    assert list(test.ask([case])) == [(case, True)]
    assert test.false_alarms.hits == 1
    assert test.alarms[0]["checks"] == ["causality"]


def test_figures_and_bars(monkeypatch, tmp_path):
    monkeypatch.setattr("bench.claim.RESULTS", tmp_path)
    asking(monkeypatch, ["causality"])
    claim = Claim("mutations", quick=True)
    measure_mutations(claim, 3, number=1)
    figures = claim.figures["mutations"]
    assert figures["cases"] == 3
    assert figures["detection"]["all"]["n"] == 3
    bars = mutation_bars(figures)
    assert [bar.name for bar in bars] == ["mutations: decidable bugs found", "mutations: false alarms"]
    assert bars[1].verdict == "PASS"
    assert mutation_bars({}) == []
    assert claim.write().is_relative_to(tmp_path)

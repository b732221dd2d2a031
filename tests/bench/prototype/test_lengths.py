"""Planted instabilities of the prototype bench, and healthy models."""

import json

import pytest

from bench.prototype import lengths
from bench.prototype.lengths import HEALTHY, Plan, healthy_spec, look_at_healthy, search_planted

TINY = Plan((12,), 8, 16, 3, 8, 32, ("untrained positions",), ("mha",))


def figures(first=192, unstable=()):
    planted = [
        {"mechanism": "growing logits", "planted": length, "first": at, "looks": 13, "notes": []}
        for length, at in ((192, first), (640, 640))
    ]
    healthy = [{"kind": "mha", "first": None, "looks": 2, "notes": [], "unstable_lengths": list(unstable)}]
    plan = {"planted": [192, 640], "mechanisms": ["growing logits"], "kinds": ["mha"]}
    return {"plan": plan, "planted": planted, "healthy": healthy}


@pytest.mark.parametrize("first, share", [(192, 1.0), (193, 0.5), (None, 0.5)])
def test_one_position_beside_is_not_found(first, share):
    values = [bar.value for bar in lengths.bars(figures(first), whole=True)]
    assert values == [share, 0.0]


def test_one_unstable_length_of_a_healthy_model_is_a_false_find():
    _, false = lengths.bars(figures(unstable=[640]), whole=True)
    assert (false.value, false.verdict) == (1.0, "SHORT")


def test_before_all_is_there_nothing_is_said():
    assert {bar.verdict for bar in lengths.bars(figures(), whole=False)} == {"NOT MEASURED"}


def test_rows():
    lines = lengths.rows(figures()).splitlines()
    assert lines[2] == "| growing logits | found at 192 | found at 640 | 13 |"
    assert lines[3] == "| mha, healthy | none found |  | 2 |"
    assert lengths.table(figures()).row_count == 3


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_models_can_be_built(kind):
    assert sum(p.numel() for p in healthy_spec(kind).build().parameters()) > 0


def test_a_planted_length_is_found_and_a_healthy_model_is_stable():
    [planted] = search_planted("untrained positions", 12, TINY)
    assert (planted["planted"], planted["first"], planted["verdict"]) == (12, 12, "found")
    [healthy] = look_at_healthy("mha", TINY)
    assert (healthy["first"], healthy["verdict"], healthy["unstable_lengths"]) == (None, "stable", [])
    assert set(healthy["verdicts"]) == {"8", "12", "16"}
    json.dumps([planted, healthy], allow_nan=False)

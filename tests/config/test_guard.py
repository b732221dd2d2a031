"""Keys of the guard: the values that each accepts and refuses, and keys that do not fit together."""

import json

import pytest
from pydantic import ValidationError

from stackwise.config import ConfigError, GuardPolicy
from tests.config.keys import (
    acceptances,
    assert_refused,
    flag,
    integer,
    number,
    problems,
    refusals,
)

KEYS = {
    "training.guard": {
        "clip": number(above=0).or_null(),
        "deviations": number(least=0),
        "factor": number(above=1).accepts(1.1),
        "suspect_factor": number(above=1).accepts(1.1).or_null(),
        "proven_factor": number(above=1, suspect_factor=None).accepts(1.1),
        "loss_factor": number(above=1).accepts(1.1).or_null(),
        "logit_factor": number(above=1).accepts(1.1).or_null(),
        "logit_limit": number(above=0).or_null(),
        "recent": integer(1).accepts(1, 128),
        "minimum": integer(1).accepts(1, 128),
        "history": integer(1, recent=1, minimum=1),
        "spikes_clipped": integer(0),
        "patience": integer(1, snapshot_interval=None),
        "rewinds": integer(0),
        "snapshot_interval": integer(1, patience=1).accepts(2, 10**9).or_null(),
        "snapshot_on_host": flag(),
        "bundle_weights": flag(),
        "max_bundles": integer(0),
    }
}


def test_table_has_a_row_for_every_key():
    assert KEYS["training.guard"].keys() == GuardPolicy.model_fields.keys()


@pytest.mark.parametrize("kind, given, key, value", acceptances(KEYS))
def test_key_accepts(kind, given, key, value):
    found = kind.from_dict(given | {key: value})
    assert found.to_dict()[key] == value


@pytest.mark.parametrize("kind, key, value, words", refusals(KEYS))
def test_key_refuses(kind, key, value, words):
    assert_refused(problems(kind, {key: value}), key, value, words)


@pytest.mark.parametrize(
    "mapping, key, value, rule",
    [
        ({"recent": 9, "history": 8}, "history", 8, "must not be below recent=9"),
        ({"minimum": 9, "history": 8}, "history", 8, "must not be below minimum=9"),
        ({"suspect_factor": 31.0}, "proven_factor", 30.0, "must not be below suspect_factor=31.0"),
        ({"patience": 50}, "snapshot_interval", 50, "must exceed patience=50"),
        ({"patience": 51}, "snapshot_interval", 50, "must exceed patience=51"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(mapping, key, value, rule):
    assert_refused(problems(GuardPolicy, mapping), key, value, [rule])


@pytest.mark.parametrize(
    "mapping",
    [
        {"recent": 9, "minimum": 9, "history": 9},
        {"suspect_factor": 30.0},
        {"suspect_factor": None, "proven_factor": 1.1},
        {"patience": 49},
        {"patience": 99, "snapshot_interval": None},
    ],
)
def test_keys_at_their_limits_are_accepted(mapping):
    assert GuardPolicy.from_dict(mapping).to_dict() == GuardPolicy().to_dict() | mapping


def test_values_come_back_from_json():
    policy = GuardPolicy(clip=0.5, patience=3, snapshot_interval=None, loss_factor=None)
    assert GuardPolicy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy


def test_refusal_in_python_is_that_of_a_file():
    with pytest.raises(ConfigError, match=r"^GuardPolicy: patience: got 0 \(int\); allowed: greater than"):
        GuardPolicy(patience=0)


def test_policy_does_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        GuardPolicy().patience = 3

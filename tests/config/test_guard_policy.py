"""GuardPolicy: values from and to JSON, and refusal of invalid values by name."""

import json

import pytest

from stackwise.config import ConfigError, GuardPolicy


def test_policy_is_data():
    policy = GuardPolicy(clip=0.5, patience=3, snapshot_interval=None, loss_factor=None)
    assert GuardPolicy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    assert GuardPolicy.from_dict({"patience": 2}) == GuardPolicy(patience=2)
    with pytest.raises(ValueError, match="patients: unknown key; did you mean 'patience'"):
        GuardPolicy.from_dict({"patients": 2})


@pytest.mark.parametrize(
    "key, value",
    [
        ("clip", 0.0),
        ("clip", True),
        ("deviations", -1.0),
        ("factor", 1.0),
        ("suspect_factor", 1.0),
        ("proven_factor", 2.0),
        ("loss_factor", 0.5),
        ("logit_factor", float("nan")),
        ("logit_limit", -1.0),
        ("recent", 0),
        ("minimum", 0),
        ("history", 7),
        ("spikes_clipped", -1),
        ("patience", 0),
        ("rewinds", -1),
        ("rewinds", 1.5),
        ("snapshot_interval", 5),
        ("max_bundles", -1),
    ],
)
def test_invalid_values(key, value):
    with pytest.raises(ConfigError, match=rf"^GuardPolicy: {key}: got {value}"):
        GuardPolicy(**{key: value})


def test_least_values():
    GuardPolicy(recent=1, minimum=1, history=1, patience=1, snapshot_interval=2, rewinds=0, max_bundles=0)

"""The alarm itself."""

import json
import math

import pytest

from stackwise.stability import Alarm


@pytest.mark.parametrize(
    "alarm, text",
    [
        (
            Alarm(8, "gradient spike", 12.345, 3.0, "head.weight"),
            "step 8: gradient spike 12.3 (limit 3) in head.weight; update skipped",
        ),
        (Alarm(0, "non-finite loss", math.nan), "step 0: non-finite loss nan; update skipped"),
        (
            Alarm(1, "non-finite gradient", math.inf, where="a, b"),
            "step 1: non-finite gradient inf in a, b; update skipped",
        ),
    ],
)
def test_text_of_an_alarm(alarm, text):
    assert str(alarm) == text


def test_alarm_is_data():
    alarm = Alarm(8, "gradient spike", 12.0, 3.0, "head.weight")
    assert Alarm(**json.loads(json.dumps(alarm.to_dict()))) == alarm


@pytest.mark.parametrize(
    "action, said",
    [
        ("clipped", "gradient clipped"),
        ("retried", "update skipped, step repeated"),
        ("rewound", "update skipped, training rewound"),
        ("raised", "update skipped, training stopped"),
    ],
)
def test_actions_of_an_alarm(action, said):
    assert str(Alarm(3, "loss spike", 9.0, 4.0, action=action)) == f"step 3: loss spike 9 (limit 4); {said}"


def test_alarm_with_batches_is_data():
    alarm = Alarm(8, "logit growth", 12.0, 3.0, "a", "raised", ((0, 8), "b", 3), True, "folder")
    assert Alarm.from_dict(json.loads(json.dumps(alarm.to_dict()))) == alarm

"""What steps had when they were made before: kept from the last snapshot on, and told of those made again."""

import json
import math

import pytest
import torch

from stackwise.stability.guard.history import ReplayReference

CPU = torch.device("cpu")


def noted(*steps):
    made = ReplayReference(CPU)
    for step in steps:
        made.record(step, norm=float(step), loss=0.5, logit=math.nan)
    return made


def told(made, steps):
    return {step: values.tolist()[:2] for step in steps if (values := made.signals_of(step)) is not None}


def test_a_step_that_is_made_once_has_nothing_before_it():
    assert told(noted(3, 4), range(9)) == {}


def test_what_is_made_again_has_what_it_had():
    made = noted(3, 4, 5)
    made.forget(before=4)
    made.start_replay()
    assert told(made, range(9)) == {4: [4.0, 0.5], 5: [5.0, 0.5]}
    assert math.isnan(made.signals_of(4)[2])
    # Nor does a step that is let pass when it is made again become the rule of the next time.
    made.record(4, norm=7.0, loss=0.25, logit=1.0)
    made.start_replay()
    assert told(made, range(9)) == {4: [4.0, 0.5], 5: [5.0, 0.5]}
    # Behind a snapshot on the way the others are still to come.
    made.forget(before=5)
    assert told(made, range(9)) == {5: [5.0, 0.5]}


def test_nothing_to_make_again():
    made = noted()
    made.start_replay()
    assert made.signals_of(0) is None


def test_the_state_goes_through_json():
    made, again = noted(3, 4), ReplayReference(CPU)
    made.start_replay()
    again.load_state_dict(json.loads(json.dumps(made.state_dict(), allow_nan=False)))
    assert told(again, range(9)) == told(made, range(9)) == {3: [3.0, 0.5], 4: [4.0, 0.5]}
    again.start_replay()  # a second rewind before the first is gone through
    assert told(again, range(9)) == told(made, range(9))


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"steps": 3, "signals": []},
        {"steps": [3], "signals": []},
        {"steps": ["3"], "signals": [[1.0, 2.0, None]]},
        {"steps": [3], "signals": [[1.0, 2.0]]},
        {"steps": [3], "signals": [[1.0, 2.0, "a"]]},
    ],
)
def test_another_state_is_refused(state):
    with pytest.raises(ValueError, match=r"replay_reference.*state_dict\(\)"):
        ReplayReference(CPU).load_state_dict(state)

"""Escalation: what is done about one alarm after another."""

import json
from dataclasses import replace

import pytest

from stackwise.stability.guard import Alarm, GuardPolicy
from stackwise.stability.guard.escalation import Escalation

POLICY = GuardPolicy(patience=3, rewinds=1, snapshot_interval=10)
GUILTY = Alarm(5, "non-finite loss", float("nan"), batch=((0, 5),), reproduced=True)
LOOP = Alarm(5, "gradient spike", 10.0, 5.0, batch=((0, 5),), reproduced=False)


def answers(escalation, alarms, can_rewind=True):
    return [(a.action, a.innocent) for a in (escalation.answer(x, can_rewind=can_rewind) for x in alarms)]


def with_batch(alarm, i):
    return replace(alarm, batch=((0, i),))


def test_bad_batches_are_skipped_then_rewound_then_training_stops():
    alarms = [with_batch(GUILTY, i) for i in range(7)]
    actions = ["skipped", "skipped", "rewound", "skipped", "skipped", "skipped", "raised"]
    assert answers(Escalation(POLICY), alarms) == [(action, False) for action in actions]


def test_training_without_a_snapshot_stops_one_alarm_later():
    alarms = [with_batch(GUILTY, i) for i in range(4)]
    actions = ["skipped", "skipped", "skipped", "raised"]
    assert answers(Escalation(POLICY), alarms, can_rewind=False) == [(action, False) for action in actions]


@pytest.mark.parametrize("reproduced", [True, None])
@pytest.mark.parametrize("kind", ["gradient spike", "loss spike"])
def test_a_finite_spike_that_may_be_of_its_batch_never_stops_training(kind, reproduced):
    spike = replace(LOOP, kind=kind, reproduced=reproduced)
    found = answers(Escalation(POLICY), [with_batch(spike, i) for i in range(9)])
    assert [action for action, _ in found] == ["skipped"] * 2 + ["rewound"] + ["skipped"] * 6


def test_unreproduced_failure_retries_its_batch():
    escalation = Escalation(POLICY)
    assert answers(escalation, [LOOP, LOOP]) == [("retried", True), ("retried", True)]
    escalation.sound(LOOP.batch)
    assert escalation.consecutive_alarms == 0


def test_batch_that_fails_again_after_a_rewind_is_skipped():
    escalation = Escalation(POLICY)
    assert answers(escalation, [LOOP] * 3)[-1] == ("rewound", True)
    for i in range(2):
        escalation.sound(((0, i),))
    # Sound steps between: the loop is in order, and yet this batch breaks.
    assert answers(escalation, [LOOP]) == [("skipped", False)]


def test_another_batch_later_has_as_much_patience():
    """What was put down to the batch that was rewound from is over with a sound step."""
    escalation = Escalation(POLICY)
    answers(escalation, [LOOP] * 3)
    for i in range(2):
        escalation.sound(((0, i),))
    assert answers(escalation, [LOOP]) == [("skipped", False)]
    escalation.sound(((0, 6),))
    other = with_batch(LOOP, 7)
    expected = [("retried", True), ("retried", True), ("skipped", False)]
    assert answers(escalation, [other] * 3, can_rewind=False) == expected


def test_persistent_loop_failure_after_a_rewind_skips_no_batch():
    escalation = Escalation(POLICY)
    answers(escalation, [LOOP] * 3)
    behind = answers(escalation, [with_batch(LOOP, 1), with_batch(LOOP, 1), with_batch(LOOP, 1)])
    assert all(innocent for _, innocent in behind)
    assert answers(escalation, [with_batch(LOOP, 1)]) == [("raised", True)]


@pytest.mark.parametrize("sound, action", [(9, "skipped"), (10, "rewound")])
def test_second_rewind_needs_a_snapshot_interval_of_sound_steps(sound, action):
    escalation = Escalation(POLICY)
    assert answers(escalation, [with_batch(GUILTY, i) for i in range(3)])[-1][0] == "rewound"
    for i in range(sound):
        escalation.sound(((1, i),))
    assert answers(escalation, [with_batch(GUILTY, i) for i in range(3)])[-1][0] == action


@pytest.mark.parametrize("unknown", [{"batch": None}, {"reproduced": None}, {"reproduced": True}])
def test_unknown_cause_is_attributed_to_the_batch(unknown):
    assert not Escalation(POLICY).answer(replace(LOOP, **unknown), can_rewind=True).innocent


def test_only_the_first_alarm_in_a_row_is_first():
    escalation = Escalation(POLICY)
    assert [escalation.answer(GUILTY, can_rewind=False).first for _ in range(3)] == [True, False, False]


def test_the_state_goes_through_json():
    escalation, again = Escalation(POLICY), Escalation(POLICY)
    answers(escalation, [LOOP] * 3)
    escalation.sound(((0, 1),))
    again.load_state_dict(json.loads(json.dumps(escalation.state_dict())))
    assert answers(again, [LOOP]) == answers(escalation, [LOOP]) == [("skipped", False)]

"""A broken run beside its clean twin: by runs that are made up, and by trainings with known ends."""

import json
import math

import pytest
import torch
from torch import nn

from stackwise.spec import ModelSpec
from stackwise.stability import Alarm, GradientExplosion, NanInjection, StabilityRun, StepRecord
from stackwise.stability.recovery import Recovery, recovery_run
from stackwise.trainer_spec import TrainerSpec

STEPS = 8


def made_up(losses, *, fired=(), alarms=(), skipped=(), faults=(), **more):
    records = [StepRecord(step, loss, 1.0, 1e-3, step in skipped) for step, loss in enumerate(losses)]
    alarms = [Alarm(step, "gradient spike", 9.0, 3.0) for step in alarms]
    return StabilityRun("m", 16, records, alarms, faults, fired, **{"finite": True, "steps": STEPS, **more})


TWIN = made_up([3.0] * STEPS)
CAUGHT = {"fired": [2], "alarms": [2], "skipped": [2], "faults": [GradientExplosion(step=2)]}


def held(run, within=3, loss_tolerance=0.1, twin=TWIN):
    return Recovery(run, twin, within, loss_tolerance)


@pytest.mark.parametrize(
    "gaps, step",
    [
        ([0, 0, 9, 0, 0, 0, 0, 0], 3),
        ([9, 9, 9, 0.1, 0.1, 0.1, 0.1, 0.1], 3),
        ([0, 0, 9, 0.2, 0.2, 0, 0, 0], 5),
        ([0, 0, 9, 0.2, -0.2, 0, 0, 0], 5),
        ([0, 0, 9, 0, 0.2, 0.2, 0, 0], 6),
        ([0, 0, 9, 0, 0, 0, 0, 0.2], None),
        ([0, 0, 9, 0, 0, 0, 0, math.nan], None),
        ([0, 0, 9, math.inf, 0, 0, 0, 0], 4),
    ],
)
def test_the_step_from_which_on_losses_agree(gaps, step):
    recovery = held(made_up([3.0 + gap for gap in gaps], **CAUGHT), loss_tolerance=0.1 + 1e-9)
    assert recovery.step == step
    assert recovery.after == (None if step is None else step - 2)
    assert recovery.ok == (step is not None and step <= 5)
    assert recovery.verdict == ("caught" if recovery.ok else "not recovered")
    assert json.loads(json.dumps(recovery.to_dict()))["recovery"]["step"] == step


@pytest.mark.parametrize(
    "change, verdict, problem",
    [
        ({"alarms": []}, "missed", "step 2 is broken: no alarm"),
        ({"alarms": [3]}, "missed", "step 2 is broken: no alarm; the first after it is at step 3"),
        ({"skipped": []}, "not recovered", "step 2 is broken: its update was made in spite of an alarm"),
        ({"alarms": [2, 5]}, "false alarm", "an alarm where nothing is broken: step 5: gradient spike 9"),
        ({"finite": False}, "not recovered", "at the end weights or buffers are not finite"),
        (
            {"stopped": "GuardError: x", "stopped_at": 6},
            "not recovered",
            "training ended at step 6: GuardError: x",
        ),
    ],
)
def test_what_is_wrong_is_said(change, verdict, problem):
    recovery = held(made_up([3.0] * STEPS, **(CAUGHT | change)))
    assert recovery.verdict == verdict
    assert any(each.startswith(problem) for each in recovery.problems)
    assert f"\n  {problem}" in str(recovery)


def test_a_twin_that_is_not_stable():
    twin = made_up([3.0] * STEPS, alarms=[4])
    [problem] = held(made_up([3.0] * STEPS, **CAUGHT), twin=twin).problems
    assert problem.startswith("without a fault: an alarm all the same: step 4")


def test_what_a_written_weight_leaves_behind_is_no_false_alarm():
    fault = NanInjection(step=2, target="weight")
    run = made_up([3.0] * STEPS, fired=[2], faults=[fault], alarms=[2, 3, 4, 6], skipped=[2, 3, 4, 6])
    assert [alarm.step for alarm in run.false_alarms] == [6]


def test_a_run_that_tells_of_no_alarms_is_asked_for_none():
    run = made_up([3.0] * STEPS, fired=[2], watched=False)
    assert (held(run).problems, held(run).verdict, run.verdict) == ([], "recovered", "missed")


class Loop:
    """Plain training; `left_out` are the calls whose update is not made."""

    left_out = ()

    def __init__(self):
        self.model = nn.Sequential(nn.Embedding(13, 8), nn.Linear(8, 13))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.calls = -1

    def step(self, batch):
        self.calls += 1
        logits = self.model(batch["input_ids"][:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        if self.calls not in self.left_out:
            self.optimizer.step()
        return loss.detach()


class LeavesOut(Loop):
    left_out = (3,)


def test_a_training_step_is_held_against_its_own_clean_run():
    spec = TrainerSpec.of(LeavesOut)
    fault = GradientExplosion(step=3, factor=1e6)
    recovery = recovery_run(spec, within=2, loss_tolerance=1.0, steps=STEPS, faults=[fault], seed=4)
    # The twin leaves the same update out: what was broken has gone with it.
    assert recovery.ok and set(recovery.gaps.values()) == {0.0}
    assert [r.step for r in recovery.run.records if r.skipped] == [3]
    run = spec.create(seed=4)
    losses = [float(run.step(spec.batch(seed=5 + step))) for step in range(STEPS)]
    assert [r.loss for r in recovery.twin.records] == losses
    broken = recovery_run(TrainerSpec.of(Loop), within=2, loss_tolerance=1.0, steps=STEPS, faults=[fault])
    assert not broken.ok
    assert not any(r.skipped for r in broken.run.records)


def test_an_update_that_changes_nothing_is_none():
    class Still(Loop):
        def __init__(self):
            super().__init__()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    recovery = recovery_run(
        TrainerSpec.of(Still), within=1, loss_tolerance=1.0, steps=4, faults=[GradientExplosion(step=1)]
    )
    assert all(r.skipped for r in recovery.run.records)


def test_what_gives_no_loss_is_refused():
    class Silent(Loop):
        def step(self, batch):
            super().step(batch)

    with pytest.raises(ValueError, match=r"Silent: step\(batch\) returned: got None; allowed: the loss"):
        recovery_run(TrainerSpec.of(Silent), within=1, loss_tolerance=1.0, faults=[NanInjection(step=1)])


def test_alarms_that_are_none_are_refused():
    class Numbers(Loop):
        alarms = (3,)

    with pytest.raises(TypeError, match=r"Numbers: alarms: got a int; wanted stackwise\.stability\.Alarm"):
        recovery_run(TrainerSpec.of(Numbers), within=1, loss_tolerance=1.0, faults=[NanInjection(step=1)])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"faults": []}, "recovers: faults: got 'none'; allowed: at least one"),
        ({"within": 0}, "recovers: within: got 0"),
        ({"loss_tolerance": math.inf}, "recovers: loss_tolerance: got inf"),
        ({"within": 5}, "recovers: within: got 5; allowed: at most 4: the last broken step is 3"),
        ({"faults": [NanInjection(step=7)]}, "recovers: within: got 2; allowed: none: .* wanted more steps"),
    ],
)
def test_what_cannot_be_judged_is_refused(subjects, arguments, message):
    given = {"within": 2, "loss_tolerance": 0.1, "steps": STEPS, "faults": [NanInjection(step=3)]}
    with pytest.raises(ValueError, match=message):
        recovery_run(ModelSpec.of(subjects.gru), **(given | arguments))

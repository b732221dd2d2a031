"""A broken run beside its clean twin: by runs that are made up, and by trainings with known ends."""

import copy
import json
import math

import pytest
import torch
from torch import nn

from stackwise.stability import Alarm, GradientExplosion, NanInjection, StabilityRun, StepRecord
from stackwise.stability.recovery import Recovery, recovery_run
from stackwise.subject.spec import ModelSpec
from stackwise.subject.trainer_spec import TrainerSpec

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
    assert (held(run).problems, held(run).verdict, run.verdict) == ([], "recovered", "recovered")


@pytest.mark.parametrize("watched", [True, False])
def test_sound_steps_that_are_left_out(watched):
    run = made_up([3.0] * STEPS, **(CAUGHT | {"skipped": [2, 4, 5]}), watched=watched)
    recovery = held(run)
    assert recovery.verdict == "not recovered"
    problem = "step 4 is not broken: its update was skipped, and of 1 more steps; the clean twin made it"
    assert recovery.problems == [problem]
    # The twin left one of them out as well, and the other was made in the end.
    again = made_up([3.0] * STEPS, **(CAUGHT | {"skipped": [2, 4, 5]}), watched=watched)
    again.records.append(StepRecord(5, 3.0, 1.0, 1e-3, False))
    assert held(again, twin=made_up([3.0] * STEPS, skipped=[4])).ok


def test_what_a_written_weight_keeps_broken_has_to_end_in_time():
    fault = NanInjection(step=2, target="weight")
    more = {"fired": [2], "faults": [fault], "watched": False}
    assert held(made_up([3.0] * STEPS, skipped=[2, 3, 4, 5], **more)).ok
    [problem] = held(made_up([3.0] * STEPS, skipped=[2, 3, 4, 5, 6], **more)).problems
    assert problem.startswith("step 6 is not broken")


@pytest.mark.parametrize(
    "drift, late, ok",
    [
        (None, None, True),
        (0.0, 0.0, True),
        (1.0, 0.5, True),
        (1.01, 0.5, False),
        (1.0, 0.51, False),
        (math.inf, 0.0, False),
    ],
)
def test_how_far_weights_may_go_from_the_twins(drift, late, ok):
    run = made_up([3.0] * STEPS, fired=[2], watched=False)
    recovery = Recovery(run, TWIN, 3, 0.1, drift, late)
    assert (recovery.ok, recovery.verdict) == (ok, "recovered" if ok else "not recovered")
    written = recovery.to_dict()["recovery"]
    assert (written["drift"], written["late_drift"]) == (drift, late)
    if not ok:
        assert recovery.problems[0].startswith("a broken step has moved the training")


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


class AdamLoop:
    """AdamW in a loop of random tokens: the loss stays where it is, whatever becomes of the weights."""

    def __init__(self):
        self.model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 32))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, batch):
        logits = self.model(batch["input_ids"][:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), 1e9))
        self.update()
        return loss.detach()

    def update(self):
        self.optimizer.step()


class Dead(AdamLoop):
    """Never makes an update again after one NaN."""

    dead = False

    def update(self):
        self.dead |= not math.isfinite(self.norm)
        if not self.dead:
            super().update()


class Forgets(AdamLoop):
    """Begins with new weights after a NaN."""

    def update(self):
        if math.isfinite(self.norm):
            super().update()
        else:
            self.model.load_state_dict(AdamLoop().model.state_dict())


class LeavesNaNOut(AdamLoop):
    def update(self):
        if math.isfinite(self.norm):
            super().update()


class Clips(AdamLoop):
    def update(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.15)
        super().update()


class GoesBack(AdamLoop):
    """Has a copy of four steps before, and takes it where weights are not finite."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def update(self):
        self.kept = [*self.kept, (copies(self.model), copies(self.optimizer))][-4:]
        super().update()
        if not all(p.isfinite().all() for p in self.model.parameters()):
            weights, state = self.kept[0]
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(state)


def copies(holder):
    return copy.deepcopy(holder.state_dict())


NAN = NanInjection(step=5, target="activation:1")
EXPLOSION = GradientExplosion(step=8, factor=1000)
EXPLOSIONS = GradientExplosion(step=3, factor=1000, duration=5)
DRIFT = "a broken step has moved the training"


@pytest.mark.parametrize(
    "loop, fault, problem",
    [
        (Dead, NAN, "step 6 is not broken: its update was skipped, and of 9 more steps"),
        (Forgets, NAN, DRIFT),
        (AdamLoop, EXPLOSION, DRIFT),
        (AdamLoop, EXPLOSIONS, DRIFT),
        (LeavesNaNOut, EXPLOSION, DRIFT),
        (LeavesNaNOut, NAN, None),
        (Clips, EXPLOSION, None),
        (Clips, EXPLOSIONS, None),
        (GoesBack, NanInjection(step=6, target="gradient"), None),
    ],
    ids=lambda value: getattr(value, "__name__", None) or (str(value) if value else "sound"),
)
def test_a_loop_whose_losses_tell_nothing(loop, fault, problem):
    recovery = recovery_run(TrainerSpec.of(loop), within=4, loss_tolerance=0.5, faults=[fault])
    assert recovery.verdict == ("not recovered" if problem else "recovered"), str(recovery)
    assert bool(recovery.problems) == bool(problem)
    assert all(each.startswith(problem) for each in recovery.problems)
    assert (recovery.drift is None) == (loop in (Dead, GoesBack) or (loop, fault) == (LeavesNaNOut, NAN))


def test_drift_is_how_far_the_ways_are_apart_over_the_way_of_the_twin():
    fault = GradientExplosion(step=3, factor=4.0)
    spec = TrainerSpec.of(Loop)
    recovery = recovery_run(spec, within=2, loss_tolerance=9.0, steps=STEPS, faults=[fault])
    weights = {1.0: [], 4.0: []}
    for factor, seen in weights.items():
        run = spec.create(seed=0)
        for step in range(STEPS + 1):
            seen.append(nn.utils.parameters_to_vector(run.model.parameters()).detach().clone())
            hooks = [p.register_hook(lambda g, f=factor: g * f) for p in run.model.parameters() if step == 3]
            run.step(spec.batch(seed=1 + step))
            for hook in hooks:
                hook.remove()
    clean, moved = weights.values()
    for since, drift in ((3, recovery.drift), (5, recovery.late_drift)):
        way = clean[-1] - clean[since]
        expected = ((moved[-1] - moved[since]) - way).norm() / way.norm()
        assert drift == pytest.approx(expected.item(), rel=1e-4)


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

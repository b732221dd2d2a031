"""What an alarm names, and whose fault it says it is: that of the batch or of the machine."""

import copy
import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stackwise.stability.faults import LossSpike, broken
from stackwise.stability.guard import Guard, GuardPolicy
from stackwise.stability.recomputation import is_recomputation, is_reference
from stackwise.support.random_state import random_states
from tests.stability.guard.guarded_run import (
    POLICY,
    N,
    element,
    guarded,
    loss_of,
    made,
    make_data,
    plain,
    resumed,
    same,
    times,
)


def executed(factor, step, count):
    """Gradients multiplied at so many executed steps from `step` on, whatever their batches."""
    fired = []

    def fault(run, now):
        if (fired or now == step) and len(fired) < count:
            times(factor, now)(run, now)
            fired.append(now)

    return fault, fired


def broken_output(run, value, *steps, layer=1, backward=False):
    """Inside layers.1.up, forward or backward, each time that it is computed at these steps."""

    def forward(_module, _args, output):
        if run.guard.steps in steps:
            return output.index_fill(1, torch.tensor([3]), value) if not backward else output
        return None

    def gradient(_module, _inputs, gradients):
        return tuple(None if g is None else g * value for g in _inputs) if run.guard.steps in steps else None

    up = run.model.layers[layer].up
    return up.register_full_backward_hook(gradient) if backward else up.register_forward_hook(forward)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("lag", [0, 2])
def test_the_module_is_named_by_computing_the_step_again(backward, lag):
    hooked = []

    def watch(run, step):
        if not hooked:
            hooked.append(broken_output(run, math.nan, 30, backward=backward))

    run = guarded("fused adamw", watch=watch, loss_of=loss_of, lag=lag, dropout=0.1)
    [alarm] = run.guard.alarms
    assert alarm.step == 30
    assert alarm.kind == ("non-finite gradient" if backward else "non-finite loss")
    assert alarm.where == f"layers.1.up ({'backward' if backward else 'forward'})"
    assert alarm.reproduced is True
    if lag == 0:
        # Computing it again left no trace: neither in random states nor in buffers.
        other = guarded("fused adamw", element(math.nan, 30), dropout=0.1)
        assert same(run.state, other.state)


def test_a_fault_that_does_not_come_again_says_so():
    run = guarded("sgd", executed(math.nan, 30, 1)[0], loss_of=loss_of)
    [alarm] = run.guard.alarms
    assert (alarm.reproduced, alarm.action) == (False, "retried")
    assert str(alarm).endswith("update skipped, step repeated; a recomputation was normal")


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("optimizer", ["fused adamw", "fused sgd"])
def test_a_broken_machine_loses_no_batch(optimizer, lag):
    fault, fired = executed(10, 60, 1)
    run = guarded(optimizer, fault, loss_of=loss_of, dropout=0.1, lag=lag)
    assert [alarm.step for alarm in run.guard.alarms] == fired == [60]
    assert run.guard.quarantined == []
    assert run.guard.skipped == 1
    assert same(run.state, plain(optimizer, dropout=0.1).state)


@pytest.mark.parametrize(
    "count", [2, 5, 10, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 4, 6, 7, 8, 9))]
)
def test_a_broken_machine_that_recovers_loses_no_batch(count):
    fault, fired = executed(10, 65, count)
    run = guarded("adamw", fault, loss_of=loss_of, dropout=0.1)
    assert [alarm.step for alarm in run.guard.alarms] == fired
    actions = ["retried"] * 4 + ["rewound"] + ["retried"] * 5
    assert [alarm.action for alarm in run.guard.alarms] == actions[:count]
    assert run.guard.quarantined == []
    assert same(run.state, plain("adamw", dropout=0.1).state)


@pytest.mark.parametrize("optimizer", ["fused adamw", "fused sgd"])
def test_a_broken_machine_is_noticed_where_a_rewind_leaves_no_history(optimizer):
    # Step 12 goes back to step 0, where the detector was new.
    fault, fired = executed(10, 12, 9)
    run = guarded(optimizer, fault, loss_of=loss_of, dropout=0.1)
    assert [alarm.step for alarm in run.guard.alarms] == fired == [12] * 5 + [0] * 4
    assert run.guard.quarantined == []
    assert same(run.state, plain(optimizer, dropout=0.1).state)


@pytest.mark.parametrize("optimizer, lag", [("fused adamw", 0), ("fused sgd", 2)])
def test_a_broken_machine_stops_it_where_a_rewind_leaves_no_history(optimizer, lag):
    run = guarded(optimizer, executed(10, 10, 1000)[0], loss_of=loss_of, dropout=0.1, lag=lag)
    assert [alarm.step for alarm in run.error.alarms] == [10] * 5 + [0] * 6
    actions = ["retried"] * 4 + ["rewound"] + ["retried"] * 5 + ["raised"]
    assert [alarm.action for alarm in run.error.alarms] == actions
    # With a lag there are zeros in place of no momentum.
    assert same(run.state["model"], plain(optimizer, dropout=0.1, before=0).state["model"])


def test_a_rewind_that_is_under_way_is_continued_with_what_it_knows():
    """A checkpoint between a rewind to step 0 and the step that it was made for."""
    data, states = make_data(), []
    fault, fired = executed(10, 12, 5)
    run = made("fused sgd", 0, dropout=0.1)
    guard = Guard(run.model, run.optimizer, scheduler=run.scheduler, policy=POLICY, loss_of=loss_of)
    for batch in guard.batches(data):
        if len(fired) == 5 and guard.steps == 0:
            states.append(
                {
                    "guard": guard.state_dict(closed=True),
                    "model": copy.deepcopy(run.model.state_dict()),
                    "optimizer": copy.deepcopy(run.optimizer.state_dict()),
                    "scheduler": run.scheduler.state_dict(),
                    "random": random_states(),
                }
            )
            break
        loss = loss_of(run.model, batch)
        loss.backward()
        fault(run, guard.steps)
        guard.step(loss)
    [state] = states
    again = resumed(state, data, executed(10, 0, 2)[0], loss_of=loss_of)
    assert [alarm.step for alarm in again.guard.alarms] == [12] * 5 + [0] * 2
    assert same(again.state, plain("fused sgd", dropout=0.1).state)


@pytest.mark.parametrize("at", [14, 15, 16])
def test_a_module_is_named_right_behind_a_snapshot_too(at):
    # It is taken at 15. What is too large is so against the batches before.
    data = make_data()
    run = guarded("sgd", data=data, loss_of=steep(data, 1000, at))
    assert [(alarm.step, alarm.where) for alarm in run.guard.alarms] == [(at, "the loss")]


def test_a_broken_machine_right_behind_a_snapshot():
    # Before and after the rewind it is the same step that breaks: nothing tells machine from batch.
    for count, lost in ((9, []), (10, [60]), (11, [60])):
        fault, fired = executed(10, 60, count)
        run = guarded("adamw", fault, loss_of=loss_of)
        assert [alarm.step for alarm in run.guard.alarms] == fired
        assert [place for _, place in run.guard.quarantined] == lost
        assert (run.error is None) == (count < 11)


def test_a_broken_machine_that_does_not_recover_stops_it():
    fault, fired = executed(10, 65, 1000)
    run = guarded("adamw", fault, loss_of=loss_of)
    assert [alarm.step for alarm in run.error.alarms] == fired
    assert len(fired) == 11
    assert fired[:5] == [65] * 5
    [again] = set(fired[5:])
    assert 45 <= again < 65
    assert run.guard.quarantined == []
    assert same(run.state, plain("adamw", before=again).state)


def test_what_breaks_in_the_loop_alone_is_put_down_to_the_batch_in_the_end():
    run = guarded("sgd", element(math.nan, 35), loss_of=loss_of)
    assert [alarm.step for alarm in run.guard.alarms] == [35] * 6
    assert [alarm.action for alarm in run.guard.alarms] == ["retried"] * 4 + ["rewound", "skipped"]
    assert {alarm.reproduced for alarm in run.guard.alarms} == {False}
    assert run.guard.alarms[0].where == "layers.1.up.weight"
    assert run.guard.quarantined == [(0, 35)]
    assert same(run.state, plain("sgd", leave_out=[35]).state)


def steep(data, factor, *places):
    """The loss of batches, some of which have a gradient so many times as large."""
    chosen = {id(data[place]) for place in places}

    def compute(model, batch):
        logits = model(batch[0])
        if id(batch) in chosen:
            logits.register_hook(lambda gradient: gradient * factor)
        return F.cross_entropy(logits, batch[1])

    return compute


@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize("optimizer", ["fused adamw", "fused sgd"])
def test_a_rise_that_is_of_the_batch_is_no_alarm(optimizer, lag):
    data = make_data()
    compute = steep(data, 5, 30, 31, 60)
    run = guarded(optimizer, data=data, loss_of=compute, dropout=0.1, lag=lag)
    assert run.guard.alarms == []
    assert run.guard.cleared >= 2
    assert run.guard.skipped == 0
    assert same(run.state, plain(optimizer, data=data, dropout=0.1, compute=compute).state)


def test_a_rise_of_the_machine_is_an_alarm_where_it_is_small():
    # 4 is below `factor`: nothing but another computation tells that it is not sound.
    run = guarded("adamw", executed(4, 60, 1)[0], loss_of=loss_of)
    [alarm] = run.guard.alarms
    assert (alarm.step, alarm.action, alarm.reproduced) == (60, "retried", False)
    assert alarm.limit < alarm.value < 5 * alarm.limit / POLICY.suspect_factor
    assert guarded("adamw", executed(4, 60, 1)[0]).guard.alarms == []


@pytest.mark.parametrize("lag", [0, 3])
def test_a_rise_of_the_batch_is_an_alarm_where_it_is_large(lag):
    data = make_data()
    compute = steep(data, 100, 60)
    run = guarded("fused adamw", data=data, loss_of=compute, lag=lag)
    [alarm] = run.guard.alarms
    assert (alarm.step, alarm.kind, alarm.action) == (60, "gradient spike", "skipped")
    assert alarm.reproduced is True
    assert run.guard.quarantined == [(0, 60)]
    assert same(run.state, plain("fused adamw", data=data, leave_out=[60]).state)


def test_a_step_that_is_trusted_is_so_after_a_checkpoint():
    data = make_data()
    compute = steep(data, 5, 60)
    run = made("sgd", 0)
    guard = Guard(run.model, run.optimizer, scheduler=run.scheduler, policy=POLICY, loss_of=compute)
    for batch in guard.batches(data):
        loss = compute(run.model, batch)
        loss.backward()
        guard.step(loss)
        if guard.steps == 60 and guard.state_dict()["detector"]["trusted"]:
            break
    other = Guard(run.model, run.optimizer, scheduler=run.scheduler, policy=POLICY, loss_of=compute)
    other.load_state_dict(guard.state_dict())
    for batch in other.batches(data, fast_forward=True):
        loss = compute(run.model, batch)
        loss.backward()
        other.step(loss)
    assert (other.alarms, other.cleared) == ([], 1)
    assert same(run.state, plain("sgd", data=data, compute=compute).state)


def test_a_broken_batch_is_the_fault_of_the_batch():
    data = make_data()
    data[30] = (data[30][0], torch.full_like(data[30][1], -100))  # 0 / 0
    run = guarded("sgd", data=data, loss_of=loss_of)
    [alarm] = run.guard.alarms
    assert (alarm.step, alarm.kind, alarm.reproduced) == (30, "non-finite loss", True)
    assert "loss" in alarm.where


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_are_held_against_those_of_the_same_scale(scaled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    data = list(torch.randn(40, 32, 8))
    given = []

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * (1e4 if given[-1] is data[20] else 1.0)

    model[1].forward = lambda x: Broken.apply(x).tanh()

    def compute(model, batch):
        given.append(batch)
        return (model(batch) - batch.sum(-1, keepdim=True)).square().mean()

    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    policy = GuardPolicy(snapshot_interval=20)
    guard = Guard(model, optimizer, policy=policy, loss_of=compute, scaler=scaler)
    for batch in guard.batches(data):
        loss = compute(model, batch)
        scaler.scale(loss).backward()
        guard.step(loss)
    assert [(alarm.step, alarm.where) for alarm in guard.alarms] == [(20, "1 (backward)")]


def test_what_overflows_only_when_it_is_computed_again_names_no_place():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    data = list(torch.randn(40, 32, 8))
    given = []

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if given[-1] is not data[20]:
                return gradient
            return gradient * (math.inf if is_recomputation() else 1e4)

    model[1].forward = lambda x: Broken.apply(x).tanh()

    def compute(model, batch):
        given.append(batch)
        return (model(batch) - batch.sum(-1, keepdim=True)).square().mean()

    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard(model, optimizer, policy=GuardPolicy(snapshot_interval=20), loss_of=compute, scaler=scaler)
    for batch in guard.batches(data):
        loss = compute(model, batch)
        scaler.scale(loss).backward()
        guard.step(loss)
    [alarm] = guard.alarms
    assert (alarm.step, alarm.kind, alarm.reproduced) == (20, "gradient spike", None)
    assert alarm.where == "0"  # as its norms say


def test_sound_steps_are_without_the_fault_of_the_broken_one():
    run = made("sgd", 0)
    guard = Guard(run.model, run.optimizer, policy=POLICY, loss_of=loss_of)
    with broken((run.model, run.optimizer), [LossSpike(step=60, factor=1e3)]):
        for batch in guard.batches(make_data()):
            loss = loss_of(run.model, batch)
            loss.backward()
            guard.step(loss)
    [alarm] = guard.alarms
    assert (alarm.kind, alarm.where, alarm.reproduced) == ("gradient spike", "the loss", True)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("fails, reproduced", [(is_recomputation, None), (is_reference, True)])
def test_a_step_that_cannot_be_computed_again_is_left_out(fails, reproduced, lag):
    """Hooks take more memory than the step did. What was found before it failed still holds."""
    data = make_data()

    def compute(model, batch):
        return loss_of(model, batch) * (100 if batch is data[30] else 1)

    def failing(model, batch):
        loss = compute(model, batch)
        if fails():
            loss.backward(retain_graph=True)
            raise torch.OutOfMemoryError("no more")
        return loss

    with pytest.warns(RuntimeWarning, match="step 30 cannot be recomputed: OutOfMemoryError"):
        run = guarded("fused adamw", data=data, loss_of=failing, lag=lag, dropout=0.1)
    [alarm] = run.guard.alarms
    assert (alarm.step, alarm.action, alarm.reproduced) == (30, "skipped", reproduced)
    assert same(run.state, guarded("fused adamw", data=data, loss_of=compute, lag=lag, dropout=0.1).state)


@pytest.mark.parametrize("lag", [0, 3])
def test_a_suspicion_that_cannot_be_looked_into_is_no_alarm(lag):
    """As where `loss_of` lacks what the loop makes of a batch: sound batches are not lost."""
    data = make_data()
    compute = steep(data, 4, 60, 80)

    def failing(model, batch):
        if is_recomputation():
            raise RuntimeError("on another device")
        return compute(model, batch)

    with pytest.warns(RuntimeWarning, match="it is unknown if its batches are the cause") as warned:
        run = guarded("fused adamw", data=data, loss_of=failing, lag=lag, dropout=0.1)
    told = [str(warning.message).split(": ")[0] for warning in warned]
    assert told == ["step 60 cannot be recomputed", "step 80 cannot be recomputed"]
    assert (run.guard.alarms, run.guard.skipped, run.guard.cleared) == ([], 0, 0)
    assert same(run.state, plain("fused adamw", data=data, dropout=0.1, compute=compute).state)


@pytest.mark.parametrize("lag", [0, 3])
def test_loss_with_own_random_generator_is_judged_without_recomputation(lag):
    """Its recomputations differ, and say nothing of the step. A NaN is located all the same."""
    generator = torch.Generator().manual_seed(0)

    def noisy(model, batch):
        level = torch.randn((), generator=generator).exp()
        return loss_of(model, batch) * level.square()

    with pytest.warns(RuntimeWarning, match="two recomputations differ") as warned:
        run = guarded("fused adamw", loss_of=noisy, lag=lag)
    assert len(warned) == 1
    assert run.guard.alarms == []
    assert run.seen[-1] == N - 1

    def broken_noisy(model, batch):
        return noisy(model, batch) + (math.nan if batch is data[60] else 0.0)

    data = make_data()
    with pytest.warns(RuntimeWarning, match="two recomputations differ"):
        run = guarded("fused adamw", data=data, loss_of=broken_noisy, lag=lag)
    assert [(a.step, a.reproduced) for a in run.guard.alarms] == [(60, True)]


@pytest.mark.parametrize("factor, alarms", [(4, []), (20, [60])])
@pytest.mark.parametrize("lag", [0, 3])
def test_after_a_look_that_fails_steps_are_looked_into_as_before(factor, alarms, lag):
    """As where memory was short for once: a sound step above `factor` is not lost for it."""
    data = make_data()
    first, compute = steep(data, factor, 60), steep(data, 20, 80)

    def loss_of_both(model, batch):
        return first(model, batch) if batch is data[60] else compute(model, batch)

    def failing(model, batch):
        if is_recomputation() and batch is data[60]:
            raise torch.OutOfMemoryError("no more")
        return loss_of_both(model, batch)

    with pytest.warns(RuntimeWarning, match="step 60 cannot be recomputed") as warned:
        run = guarded("fused adamw", data=data, loss_of=failing, lag=lag)
    assert len(warned) == 1
    assert [alarm.step for alarm in run.guard.alarms] == alarms
    assert run.guard.cleared == 1
    assert same(run.state, plain("fused adamw", data=data, compute=loss_of_both, leave_out=alarms).state)


@pytest.mark.parametrize("module, where", [("layers.1", "layers.1.down"), ("layers.0", "layers.0.down")])
def test_a_gradient_that_explodes_midway_names_the_first_module_behind(module, where):
    """All modules before it have large gradients too; backward, it is the first."""
    data, run = make_data(), made("adamw", 0)
    guard = Guard(run.model, run.optimizer, policy=POLICY)

    def explode(_module, _inputs, output):
        if guard.steps == 60:
            output.register_hook(lambda gradient: 100 * gradient)

    run.model.get_submodule(module).register_forward_hook(explode)
    for batch in guard.batches(data):
        loss = loss_of(run.model, batch)
        loss.backward()
        guard.step(loss)
    assert [(alarm.step, alarm.where) for alarm in guard.alarms] == [(60, where)]


@pytest.mark.parametrize("again", [{}, {"loss_of": loss_of}], ids=["by norms", "computed again"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_factor_of_all_gradients_is_told_with_its_size(optimizer, again):
    run = guarded(optimizer, times(10, 60), **again)
    found = re.fullmatch(r"all modules \(gradients x([0-9.]+)\)", run.guard.alarms[0].where)
    assert found and float(found[1]) == pytest.approx(10, rel=0.01 if again else 0.5)

"""State: a run that is continued is the run."""

import copy
import json
import math

import pytest
import torch
from torch import nn

from stackwise.checkpoint import CheckpointManager
from stackwise.stability.guard import Guard, GuardPolicy
from stackwise.support.random_state import random_states
from tests.stability.guard.guarded_run import (
    OPTIMIZERS,
    POLICY,
    N,
    Outcome,
    Small,
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


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize(
    "at",
    [
        30,
        pytest.param(61, marks=pytest.mark.slow),
        62,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (66, 90)),
    ],
)
def test_a_run_that_is_continued_ends_the_same(at, lag):
    fault, data, states = times(10, *range(60, 67)), make_data(), []

    run = made("fused sgd", 0, dropout=0.1)
    guard = run.guard = Guard(run.model, run.optimizer, scheduler=run.scheduler, policy=POLICY, lag=lag)
    for made_steps, batch in enumerate(guard.batches(data), start=1):
        step = guard.steps
        loss = loss_of(run.model, batch)
        loss.backward()
        fault(run, step)
        guard.step(loss)
        if made_steps == at:
            guard.settle()
            kept = guard.state_dict()
            states.append(
                copy.deepcopy(
                    {
                        "guard": kept,
                        "model": run.model.state_dict(),
                        "optimizer": run.optimizer.state_dict(),
                        "scheduler": run.scheduler.state_dict(),
                        "random": random_states(),
                    }
                )
            )
    final, alarms = copy.deepcopy(run.state), list(guard.alarms)
    [state] = states
    json.dumps({key: state["guard"][key] for key in ("alarms", "skipped", "escalation")})
    again = resumed(state, data, fault, lag=lag)
    assert [(a.step, a.action) for a in again.guard.alarms] == [(a.step, a.action) for a in alarms]
    assert again.guard.quarantined == guard.quarantined
    assert again.guard.steps == N
    assert same(again.state, final)


def test_batches_that_no_checkpoint_takes_are_told_of_at_the_first_state():
    """And not behind the first rewind, when there are some to be given again."""

    class Odd:
        def __init__(self, rows):
            self.rows = rows

    model = nn.Linear(2, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in guard.batches([Odd(torch.ones(2, 2)) for _ in range(3)]):
        model(batch.rows).sum().backward()
        guard.step(model(batch.rows).sum())
        if guard.steps == 1:
            with pytest.warns(
                RuntimeWarning, match=r"batch: got .*Odd; allowed in a checkpoint: .* a rewind"
            ):
                guard.state_dict()
        else:
            guard.state_dict()


@pytest.mark.parametrize("killed_after", [3, 6])
@pytest.mark.parametrize("every", [1, 10])
def test_no_checkpoint_of_broken_weights_is_gone_on_from(tmp_path, every, killed_after):
    """A weight breaks behind the update of step 28: alarms at 29 to 33, and a rewind.

    The process is killed within the row, or just behind it.
    """
    data = make_data(count=60)

    def run(directory, *, breaks, steps=N):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        policy = GuardPolicy(snapshot_interval=10)
        with CheckpointManager(directory, keep_last=5) as manager:
            guard = Guard(model, optimizer, policy=policy, loss_of=loss_of, on_rewind=manager.rewind)
            objects = {"model": model, "optimizer": optimizer, "guard": guard}
            resumed = manager.restore(objects) is not None
            for count, batch in enumerate(guard.batches(data, fast_forward=resumed), start=1):
                loss = loss_of(model, batch)
                loss.backward()
                guard.step(loss)
                if guard.steps % every == 0 and not guard.consecutive_alarms:
                    manager.save(guard.steps, objects)
                if breaks and count == 29:
                    with torch.no_grad():
                        model[1].bias[0] = math.nan
                if count == steps:
                    break
        return model, guard

    directory = tmp_path / "run"
    _, guard = run(directory, breaks=True, steps=29 + killed_after)
    assert guard.consecutive_alarms == (3 if killed_after == 3 else 0)
    assert len(guard.alarms) == min(5, killed_after)
    resumed, guard = run(directory, breaks=False)
    assert all(p.isfinite().all() for p in resumed.parameters())
    assert guard.steps == 60
    if killed_after == 3:  # else five batches may be in quarantine
        sound, _ = run(tmp_path / "sound", breaks=False)
        assert same(resumed.state_dict(), sound.state_dict())


def test_a_checkpoint_from_just_before_a_row_is_set_aside_by_the_rewind(tmp_path):
    data, called = make_data(count=60), []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager = CheckpointManager(tmp_path, keep_last=5)

    def on_rewind(step):
        manager.rewind(step)
        sound = bool(model[1].bias.isfinite().all())
        called.append((step, guard.steps, guard.consecutive_alarms, manager.steps(), sound))

    guard = Guard(model, optimizer, policy=GuardPolicy(snapshot_interval=10), on_rewind=on_rewind)
    for count, batch in enumerate(guard.batches(data), start=1):
        loss = loss_of(model, batch)
        loss.backward()
        guard.step(loss)
        if count == 29:
            with torch.no_grad():
                model[1].bias[0] = math.nan
        if guard.steps in (20, 29) and not called:
            manager.save(guard.steps, {"model": model})
    assert called == [(25, 25, 0, [20], True)]
    assert (tmp_path / "step-29.damaged").is_dir()


def test_a_clipped_update_may_be_saved():
    """It is an alarm of the row; but the update was made, and weights are what it made them."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard, found = Guard(model, optimizer, policy=GuardPolicy(spikes_clipped=2)), []
    torch.manual_seed(0)
    for step, batch in enumerate(guard.batches([torch.randn(4, 4) for _ in range(60)])):
        by = {50: math.nan, 51: 1e4, 52: 1e4}.get(step, 1.0)
        loss = (model(batch) - 1).square().mean() * by
        loss.backward()
        guard.step(loss)
        found.append(guard.consecutive_alarms)
    assert [(alarm.step, alarm.action) for alarm in guard.alarms][:3] == [
        (50, "skipped"),
        (51, "clipped"),
        (52, "clipped"),
    ]
    assert found[50:53] == [1, 0, 0]
    other = Guard(model, optimizer, policy=GuardPolicy(spikes_clipped=2))
    for last_skipped in (True, False):
        state = guard.state_dict() | {"last_skipped": last_skipped}
        state["escalation"] |= {"consecutive_alarms": 3}
        other.load_state_dict(state)
        assert other.consecutive_alarms == 3 * last_skipped


def test_a_state_is_refused_that_undoes_what_was_saved_before_it():
    run = made("fused sgd", 0)
    guard = Guard(run.model, run.optimizer, policy=POLICY, lag=4)
    for batch in guard.batches(make_data()):
        loss = loss_of(run.model, batch)
        loss.backward()
        element(math.nan, 30)(run, guard.steps)
        guard.step(loss)
        if guard.steps == 32:
            with pytest.raises(ValueError, match=r"alarms that undid steps'; allowed: settle\(\) before"):
                guard.state_dict()
            assert guard.state_dict()["skipped"] == 1  # by now it is what it says
            break


def test_alarms_cannot_be_answered_between_the_batches_of_a_step():
    run = made("fused sgd", 0)
    guard = Guard(run.model, run.optimizer, policy=POLICY, lag=4)
    for given, batch in enumerate(guard.batches(make_data()), start=1):
        (loss_of(run.model, batch) / 2).backward()
        if given == 21:
            with pytest.raises(ValueError, match=r"settle: .* a pending batch"):
                guard.settle()
            break
        if given % 2 == 0:
            guard.step(loss_of(run.model, batch))


def test_what_was_given_before_an_end_is_not_of_the_next_epoch():
    run = made("sgd", 0)
    guard = Guard(run.model, run.optimizer, policy=POLICY, loss_of=loss_of)
    for _ in guard.batches(make_data()):
        break  # without a step
    for batch in guard.batches(make_data(1)):
        loss = loss_of(run.model, batch)
        run.optimizer.zero_grad()
        loss.backward()
        element(math.nan, 0)(run, guard.steps)
        guard.step(loss)
        if guard.alarms:
            break
    assert guard.alarms[0].batch == ((1, 0),)


@pytest.mark.parametrize("lag", [0, 2])
def test_parameters_that_the_optimizer_is_given_later_are_judged(lag):
    torch.manual_seed(0)
    model = Small()
    head = list(model.head.parameters())
    rest = [p for name, p in model.named_parameters() if not name.startswith("head.")]
    for p in rest:
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW(head, lr=3e-3, fused=True)
    guard = Guard(model, optimizer, policy=POLICY, loss_of=loss_of, lag=lag)
    for batch in guard.batches(make_data()):
        if guard.steps == 30:
            for p in rest:
                p.requires_grad_(True)
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": rest})
        loss = loss_of(model, batch)
        loss.backward()
        if guard.steps == 40:
            model.layers[1].up.weight.grad.view(-1)[7] = math.nan
        guard.step(loss)
    assert {alarm.step for alarm in guard.alarms} == {40}
    assert guard.alarms[0].where == "layers.1.up.weight"
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert "layers.1.up.weight" in guard.records()[-1].parameter_norms


@pytest.mark.parametrize("lag", [0, 2])
def test_parameters_that_are_exchanged_for_as_many_are_judged(lag):
    torch.manual_seed(0)
    body, *heads = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)
    model = nn.ModuleDict({"body": body, "first": heads[0], "second": heads[1]})
    optimizer = torch.optim.AdamW([*body.parameters(), *heads[0].parameters()], lr=1e-2, fused=True)
    head = heads[0]

    def compute(_, batch):
        return (head(body(batch)) - batch.sum(-1, keepdim=True)).square().mean()

    guard = Guard(model, optimizer, policy=POLICY, loss_of=compute, lag=lag)
    for number, batch in enumerate(guard.batches(torch.randn(20, 16, 8))):
        if number == 6:
            head = heads[1]
            optimizer.param_groups[0]["params"] = [*body.parameters(), *head.parameters()]
        loss = compute(model, batch)
        loss.backward()
        if guard.steps == 10:
            head.weight.grad[0, 3] = math.nan
        guard.step(loss)
    assert {(alarm.step, alarm.where) for alarm in guard.alarms} == {(10, "second.weight")}
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("change", ["added", "removed"])
def test_groups_may_change_while_an_alarm_is_under_way(change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    groups = [{"params": list(model[2].parameters())}, {"params": list(model[0].parameters())}]
    optimizer = torch.optim.AdamW(groups[: 1 + (change == "removed")], lr=1e-2, fused=True)

    def compute(model, batch):
        return (model(batch) - batch.sum(-1, keepdim=True)).square().mean()

    data = torch.randn(30, 16, 8)
    data[10, 0, 0] = math.nan
    guard = Guard(model, optimizer, policy=POLICY, loss_of=compute, lag=4)
    for number, batch in enumerate(guard.batches(data)):
        if number == 12:
            if change == "added":
                optimizer.add_param_group(groups[1])
            else:
                del optimizer.param_groups[1]
        loss = compute(model, batch)
        loss.backward()
        guard.step(loss)
    assert [(alarm.step, alarm.action) for alarm in guard.alarms] == [(10, "skipped")]
    assert guard.steps == 30


@pytest.mark.parametrize("lag", [0, 2])
def test_a_parameter_of_no_module_is_computed_again_as_well(lag):
    """One that the loss has: its gradient is neither forgotten too late nor left out."""
    torch.manual_seed(0)
    model, gain = nn.Linear(8, 1), nn.Parameter(torch.ones(()))
    data = list(torch.randn(40, 32, 8))
    data[20] = data[20] * 2  # four times the gradient, of the batch itself

    def compute(model, batch):
        return (gain * model(batch) - batch.sum(-1, keepdim=True)).square().mean() + 0 * gain

    optimizer = torch.optim.SGD([*model.parameters(), gain], lr=1e-4, fused=True)
    guard = Guard(model, optimizer, policy=POLICY, loss_of=compute, lag=lag)
    for _ in range(2):
        for batch in guard.batches(data):
            loss = compute(model, batch)
            loss.backward()
            guard.step(loss)
    assert guard.alarms == []
    assert guard.cleared > 0
    assert gain.grad is None


def test_a_spike_of_fp16_is_computed_again_with_its_scale():
    """What a float16 backward pass loses without a scale is no fault of the loop."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    data = list(torch.randn(40, 32, 8))
    data[20] = data[20] * 3

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.half().float()

    def compute(model, batch):
        return 1e-7 * Half.apply(model(batch) - batch.sum(-1, keepdim=True)).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu")
    policy = GuardPolicy(snapshot_interval=20, loss_factor=None)
    guard = Guard(model, optimizer, policy=policy, loss_of=compute, scaler=scaler)
    for batch in guard.batches(data):
        loss = compute(model, batch)
        scaler.scale(loss).backward()
        guard.step(loss)
    assert guard.alarms == []
    assert guard.cleared > 0


def test_a_scaler_that_was_not_asked_is_held():
    model = nn.Linear(2, 1)
    guard = Guard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=torch.amp.GradScaler("cpu"), policy=POLICY
    )
    guard.reset_scaler()  # as where nothing is clipped, so that nobody unscaled


def test_small_gradients_for_a_while_make_no_alarms_of_a_rewind():
    fault, fired = element(math.nan, *range(49, 54)), []  # behind the snapshot at 45

    def faults(run, step):
        fault(run, step)
        if 45 <= step < 49 and step not in fired:
            fired.append(step)
            times(0.02, step)(run, step)

    run = guarded("sgd", faults)
    assert [alarm.step for alarm in run.guard.alarms] == list(range(49, 54))
    assert run.guard.alarms[-1].action == "rewound"
    assert same(run.state, plain("sgd", leave_out=range(49, 54)).state)


def test_the_detector_survives_a_checkpoint():
    torch.manual_seed(0)
    model = Small()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    guard, data = Guard(model, optimizer), make_data()
    for batch in data[:40]:
        loss = loss_of(model, batch)
        loss.backward()
        guard.step(loss)
    state = guard.state_dict()
    known, forgetful = Guard(model, optimizer), Guard(model, optimizer)
    known.load_state_dict(state)
    for each, alarms in ((known, [40]), (forgetful, [])):
        loss = loss_of(model, data[40])
        loss.backward()
        times(10, 0)(Outcome(model, optimizer, None), 0)
        each.step(loss)
        assert [alarm.step for alarm in each.alarms] == alarms


def test_a_state_of_something_else_is_refused():
    model = Small()
    guard = Guard(model, OPTIMIZERS["sgd"](model.parameters()))
    with pytest.raises(ValueError, match=r"state: got .*'detector'"):
        guard.load_state_dict({"loader": {}})

"""Buffers, parameters and optimizer state that stop being finite while loss and gradients are finite."""

import math

import pytest
import torch
from torch import nn

from stackwise.stability.guard import Guard, GuardError, GuardPolicy
from tests.stability.guard.guarded_run import POLICY, Small, loss_of, make_data, same

OVERFLOWING = 1e30  # its square is infinite in float32


class Normalized(nn.Module):
    """Batch statistics of rows that overflow are infinite; what is normalized by them is 0."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("best", torch.tensor(math.inf))

    def forward(self, x):
        return self.head(self.norm(x))


def rows(broken_at=()):
    torch.manual_seed(1)
    return [torch.randn(16, 4) * (OVERFLOWING if step in broken_at else 1) for step in range(40)]


def mean_square(model, x):
    return (model(x) - 1).square().mean()


def trained(data, guard=None, **arguments):
    torch.manual_seed(0)
    model = Normalized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    if guard is not None:
        guard = Guard(model, optimizer, policy=POLICY, **arguments)
    for batch in data if guard is None else guard.batches(data):
        loss = mean_square(model, batch)
        loss.backward()
        if guard is None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            guard.step(loss)
    return model, guard


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("loss", [None, mean_square])
def test_a_buffer_that_overflows_is_found_in_its_step_and_restored(lag, loss):
    assert not trained(rows(broken_at=(20,)))[0].norm.running_var.isfinite().all()
    model, guard = trained(rows(broken_at=(20,)), guard=True, lag=lag, loss_of=loss)
    [alarm] = guard.alarms
    assert (alarm.step, alarm.kind, alarm.action) == (20, "non-finite buffer", "skipped")
    assert "norm.running_var" in alarm.where
    assert (alarm.reproduced, guard.quarantined) == (None if loss is None else True, [(0, 20)])
    twin, _ = trained([batch for step, batch in enumerate(rows()) if step != 20])
    assert same(model.state_dict(), twin.state_dict())


def test_a_buffer_that_breaks_in_the_loop_alone_costs_no_batch():
    torch.manual_seed(0)
    model, broken = Normalized(), []
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), policy=POLICY, loss_of=mean_square)
    for batch in guard.batches(rows()):
        loss = mean_square(model, batch)
        loss.backward()
        if guard.steps == 20 and not broken:
            broken.append(20)
            model.norm.running_mean[1] = math.nan
        guard.step(loss)
    [alarm] = guard.alarms
    assert (alarm.step, alarm.action, alarm.where) == (20, "retried", "norm.running_mean")
    assert guard.quarantined == [] and model.norm.running_mean.isfinite().all()


def test_buffers_are_restored_in_a_loop_that_draws_its_own_batches():
    torch.manual_seed(0)
    model = Normalized()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for batch in rows(broken_at=(20,)):
        loss = mean_square(model, batch)
        loss.backward()
        guard.step(loss)
    assert [(alarm.step, alarm.kind) for alarm in guard.alarms] == [(20, "non-finite buffer")]
    assert all(buffer.isfinite().all() for buffer in model.norm.buffers())


def test_an_overflow_that_the_scaler_answers_leaves_no_broken_buffer():
    torch.manual_seed(0)
    model = Normalized()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), scaler=scaler)
    for step, batch in enumerate(guard.batches(rows(broken_at=(20,)))):
        loss = mean_square(model, batch)
        scaler.scale(loss).backward()
        if step == 20:
            model.head.weight.grad[:] = math.inf
        guard.step(loss)
    assert guard.alarms == []
    assert all(buffer.isfinite().all() for buffer in model.norm.buffers())


class Breaking(torch.optim.AdamW):
    """Its update of some batches breaks a weight, or its own state, though their gradients are finite."""

    what, when = "weight", ()

    def step(self, closure=None):
        super().step()
        [group] = self.param_groups
        p = group["params"][0]
        if self.now in self.when:
            (p.data if self.what == "weight" else self.state[p][self.what]).view(-1)[3] = math.inf


@pytest.fixture
def run():
    """Train with a guard, or without it and without some batches."""

    def trained(what="weight", when=(), *, policy=POLICY, steps=100, leave_out=(), guarded=True):
        torch.manual_seed(0)
        model = Small()
        model.unused = nn.Parameter(torch.ones(4))
        others = [p for name, p in model.named_parameters() if name != "unused"]
        optimizer = Breaking([model.unused, *others], lr=3e-3)
        optimizer.what, optimizer.when = what, when
        data = list(enumerate(make_data()))[:steps]
        data = [(number, batch) for number, batch in data if number not in leave_out]
        guard = Guard(model, optimizer, policy=policy) if guarded else None
        error = None
        try:
            for number, batch in data if guard is None else guard.batches(data):
                optimizer.now = number
                loss = loss_of(model, batch) + 0.01 * model.unused[0]
                loss.backward()
                if guard is None:
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    guard.step(loss)
        except GuardError as raised:
            error = raised
        return model, optimizer, guard, error

    return trained


@pytest.mark.parametrize(
    "what, kind, where",
    [
        ("weight", "non-finite parameter", "unused"),
        ("exp_avg_sq", "non-finite optimizer state", "unused.exp_avg_sq"),
    ],
)
@pytest.mark.parametrize("at", [30, 99])
def test_what_an_update_breaks_is_found_and_undone(run, what, kind, where, at):
    """Before the next snapshot, or behind the last step; the replay tells which batch it was."""
    model, optimizer, guard, error = run(what, (at,))
    assert error is None
    found = {(alarm.kind, alarm.where, alarm.action) for alarm in guard.alarms}
    assert found == {(kind, where, "rewound")}
    assert [alarm.batch for alarm in guard.alarms] == [None, ((0, at),)]
    assert guard.alarms[1].step == at
    twin, wanted, _, _ = run(leave_out=(at,), guarded=False)
    assert same(model.state_dict(), twin.state_dict())
    assert same(optimizer.state_dict(), wanted.state_dict())


def test_updates_that_break_for_good_end_training(run):
    *_, error = run("exp_avg_sq", range(30, 100))
    assert error.alarm.kind == "non-finite optimizer state"
    assert str(error.alarm) == "step 31: non-finite optimizer state in unused.exp_avg_sq; training stopped"


@pytest.mark.parametrize("policy", [GuardPolicy(snapshot_interval=None), GuardPolicy(rewinds=0)])
def test_without_a_rewind_the_end_of_the_loader_raises(run, policy):
    _, _, guard, error = run("exp_avg_sq", (95,), policy=policy)
    assert error.alarm.kind == "non-finite optimizer state"
    assert [alarm.action for alarm in guard.alarms] == ["raised"]


def test_settle_finds_what_the_last_step_has_broken():
    model = nn.Linear(4, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1e38))
    loss = 10 * model(torch.ones(2, 4)).sum()
    loss.backward()
    guard.step(loss)
    assert guard.alarms == []
    with pytest.raises(GuardError, match="non-finite parameter in weight, bias; training stopped"):
        guard.settle()


@pytest.mark.parametrize("lag", [0, 2])
def test_a_parameter_that_is_never_finite_is_no_alarm(lag):
    torch.manual_seed(0)
    model = Normalized()
    model.scores = nn.Parameter(torch.full((3,), -math.inf), requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    guard = Guard(model, optimizer, policy=POLICY, lag=lag)
    for batch in guard.batches(rows()):
        loss = mean_square(model, batch)
        loss.backward()
        guard.step(loss)
    guard.settle()
    assert guard.alarms == []


class Least(torch.optim.SGD):
    """Has the smallest gradient of each weight so far, which is infinite before the first one."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            least = self.state[p].setdefault("least", torch.full_like(p, math.inf))
            torch.minimum(least, p.grad.abs().where(p.grad != 0, math.inf), out=least)
        super().step()


@pytest.mark.parametrize("steps", [1, 60])
def test_state_that_begins_at_infinity_is_no_alarm(steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 1))
    optimizer = Least(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, policy=POLICY)
    for batch in guard.batches([torch.randint(0, 10, (8,)) for _ in range(steps)]):
        loss = model(batch).square().mean()
        loss.backward()
        guard.step(loss)
    assert guard.alarms == []
    assert not optimizer.state[model[0].weight]["least"].isfinite().all()


def test_a_snapshot_of_broken_state_is_not_taken_for_healthy():
    """With a lag nobody looks at what a snapshot is taken of, as that would make the host wait."""
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    guard = Guard(model, optimizer, policy=POLICY, lag=2)

    def train():
        for batch in guard.batches(make_data()):
            loss = loss_of(model, batch)
            loss.backward()
            guard.step(loss)
            if guard.steps == 70:
                optimizer.state[model.head.bias]["exp_avg_sq"][2] = math.inf

    with pytest.raises(GuardError, match=r"optimizer state in head\.bias\.exp_avg_sq; training stopped"):
        train()
    assert [alarm.action for alarm in guard.alarms] == ["raised"]

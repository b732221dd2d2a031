"""What breaks is noticed where it breaks, and training then is as if it had not been there."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from stackwise.stability.guard import Guard, GuardError, GuardPolicy
from tests.stability.guard.guarded_run import (
    FAULTS,
    OPTIMIZERS,
    POLICY,
    N,
    element,
    guarded,
    loss_of,
    make_data,
    plain,
    same,
    times,
)


def validation(run, seed=0):
    run.model.eval()
    with torch.no_grad():
        loss = sum(loss_of(run.model, batch).item() for batch in make_data(seed, 8, 512)) / 8
    run.model.train()
    return loss


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize(
    "optimizer, at",
    [
        ("adamw", 60),
        ("sgd", 20),
        *(
            pytest.param(name, at, marks=pytest.mark.slow)
            for name, at in [
                ("adamw", 20),
                ("sgd", 60),
                ("fused adamw", 20),
                ("fused adamw", 60),
                ("fused sgd", 20),
                ("fused sgd", 60),
            ]
        ),
    ],
)
def test_alarm_at_the_step_and_training_as_if_it_had_not_been_there(optimizer, name, at):
    fault, broken, kind, where = FAULTS[name](at)
    before = {}

    def watch(run, step):
        if step in (at, at + 1):
            before.setdefault(step, copy.deepcopy(run.state))

    run = guarded(optimizer, fault, watch=watch, seed=at)
    assert run.error is None
    assert [alarm.step for alarm in run.guard.alarms] == broken
    assert {alarm.kind for alarm in run.guard.alarms} == {kind}
    assert run.guard.alarms[0].where.startswith(where)
    assert [alarm.batch for alarm in run.guard.alarms] == [((0, step),) for step in broken]
    # Before the update: the step after it begins as it did.
    assert same(before[at], before[at + 1])
    # As if the batch were not there: parameters, buffers, optimizer, scheduler.
    twin = plain(optimizer, seed=at, leave_out=broken)
    assert same(run.state, twin.state)
    assert run.scheduler.last_epoch == N - len(broken)
    assert run.guard.quarantined == [(0, step) for step in broken]
    assert run.guard.skipped == len(broken)
    assert run.guard.steps == N
    # No batch is lost, and none is given twice but for a rewind.
    assert set(run.seen) == set(range(N))
    if len(broken) == 1:
        assert run.seen == list(range(N))
    limit = 0.02 * len(broken)
    assert abs(validation(run, at) - validation(plain(optimizer, seed=at), at)) <= limit


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_rewind_goes_back_once_and_gives_the_batches_again(optimizer):
    run = guarded(optimizer, times(math.nan, *range(68, 78)))
    falls = [(a, b) for a, b in zip(run.seen, run.seen[1:], strict=False) if b != a + 1]
    [(last, first), (behind, beyond)] = falls
    assert last == 72
    assert last + 1 - first <= POLICY.snapshot_interval
    assert (behind, beyond) == (67, 73)  # without those in quarantine
    assert [alarm.action for alarm in run.guard.alarms] == ["skipped"] * 4 + ["rewound"] + ["skipped"] * 5


@pytest.mark.parametrize("at", [20, 60])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_lasting_fault_ends_in_a_diagnosis(optimizer, at):
    run = guarded(optimizer, times(math.nan, *range(at, N)))
    assert isinstance(run.error, GuardError)
    actions = [alarm.action for alarm in run.guard.alarms]
    assert actions == ["skipped"] * 4 + ["rewound"] + ["skipped"] * 5 + ["raised"]
    assert run.error.alarm.step == at + 10
    assert "training stopped" in str(run.error)
    assert run.error.alarms == run.guard.alarms
    # Earlier progress is there to the bit.
    assert same(run.state, plain(optimizer, before=at).state)


def test_without_a_rewind_left_it_stops_sooner():
    for policy in (GuardPolicy(snapshot_interval=None), GuardPolicy(rewinds=0)):
        run = guarded("sgd", times(math.nan, *range(60, N)), policy=policy)
        assert [alarm.action for alarm in run.guard.alarms] == ["skipped"] * 5 + ["raised"]


def test_rewinds_are_counted_until_training_is_sound_for_long():
    policy = GuardPolicy(snapshot_interval=10, patience=2)
    near = guarded("adamw", times(math.nan, 30, 31, 34, 35, 36), policy=policy)
    assert near.error is not None
    far = guarded("adamw", times(math.nan, 30, 31, 60, 61), policy=policy)
    assert far.error is None
    assert [alarm.action for alarm in far.guard.alarms] == ["skipped", "rewound"] * 2
    assert same(far.state, plain("adamw", leave_out=[30, 31, 60, 61]).state)


def test_a_lasting_finite_fault_is_skipped_once_without_recomputation():
    run = guarded("adamw", times(10, *range(60, 70)))
    assert [alarm.step for alarm in run.guard.alarms] == [60]
    assert run.error is None


def test_a_spike_that_was_learned_passes_after_a_rewind_too():
    def steep(model, batch):
        loss = loss_of(model, batch[:2])
        return loss + (batch[2] - 1) * (loss - loss.detach())  # the same loss, another factor of its gradient

    factors = {62: 300.0, 64: math.nan, 65: math.nan, 70: 300.0}
    data = [(*batch, factors.get(i, 1.0)) for i, batch in enumerate(make_data())]
    policy = GuardPolicy(snapshot_interval=20, patience=2)
    run = guarded("adamw", data=data, policy=policy, loss_of=steep)
    actions = [(alarm.step, alarm.action) for alarm in run.guard.alarms]
    assert actions == [(62, "skipped"), (64, "skipped"), (65, "rewound")]


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_clean_training_has_no_alarm_and_is_not_touched(optimizer, seed):
    run = guarded(optimizer, seed=seed, dropout=0.1)
    assert run.guard.alarms == []
    assert run.seen == list(range(N))
    assert same(run.state, plain(optimizer, seed=seed, dropout=0.1).state)


def restart(run, step):
    if step in (20, 60):
        run.scheduler.base_lrs = [3 * rate for rate in run.scheduler.base_lrs]


# With the other SGD of these tests a rate three times as high is one that diverges.
@pytest.mark.parametrize("optimizer", ["adamw", "calm sgd"])
@pytest.mark.parametrize("seed", SEEDS)
def test_sound_changes_are_no_alarm(optimizer, seed):
    assert guarded(optimizer, watch=restart, seed=seed).guard.alarms == []
    for rows in (64, 512):
        data = [*make_data(seed, 60), *make_data(seed, 40, rows=rows)]
        assert guarded(optimizer, data=data, seed=seed).guard.alarms == []
    shift = times(3, *range(60, N))  # gradients three times as large from here on
    assert guarded(optimizer, shift, seed=seed).guard.alarms == []


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_unguarded_training_fails_the_same_test(optimizer):
    # The negative controls: this test could not pass by luck.
    clean = validation(plain(optimizer))
    assert validation(plain(optimizer, times(1000, 60))) - clean > 0.05 or optimizer == "sgd"
    assert not abs(validation(plain(optimizer, times(1000, 60))) - clean) <= 0.02
    assert math.isnan(validation(plain(optimizer, element(math.nan, 60))))
    # Under Adam a lasting factor is not to be seen in the loss, only in the norm.
    if optimizer == "adamw":
        assert abs(validation(plain(optimizer, times(10, *range(60, N)))) - clean) <= 0.02


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_one_nan_costs_one_step_and_the_detector_lives(optimizer):
    def fault(run, step):
        element(math.nan, 20)(run, step)
        times(10, 60)(run, step)

    run = guarded(optimizer, fault)
    assert [(a.step, a.kind) for a in run.guard.alarms] == [
        (20, "non-finite gradient"),
        (60, "gradient spike"),
    ]
    assert run.guard.skipped == 2
    assert same(run.state, plain(optimizer, leave_out=[20, 60]).state)


class Contrast(nn.Module):
    """Its second part is a running average of the first, that each forward pass takes on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(8, 4), nn.Linear(8, 4)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)
        return (self.student(x) - self.teacher(x) - x[:, :4]).square().mean()


def contrasted(data, leave_out=(), start=0, state=None, **arguments):
    """Trained under a guard where there are arguments, else plainly from `state` before step `start`.

    Returns:
        the model, the guard, and the state before step `start`.
    """
    model = Contrast()
    if state is not None:
        model.load_state_dict(state)
    # The average is among its parameters too, and gets no gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    if not arguments:
        for step, batch in enumerate(data[start:], start):
            if step not in leave_out:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return model, None, state
    guard = Guard(model, optimizer, loss_of=lambda model, batch: model(batch), **arguments)
    for batch in guard.batches(data):
        if guard.steps == start:
            state = copy.deepcopy(model.state_dict())
        loss = model(batch)
        loss.backward()
        guard.step(loss)
    return model, guard, state


@pytest.mark.parametrize("lag", [0, 2])
def test_weights_that_forward_passes_write_are_as_without_the_guard(lag):
    """From the first step on that was looked into, by which it is known that they do."""
    torch.manual_seed(3)
    data = [torch.randn(16, 8) for _ in range(60)]
    data[10], data[30] = data[10] * 2.2, data[30] * 2.2
    policy = GuardPolicy(loss_factor=None)
    model, guard, state = contrasted(data, start=15, policy=policy, lag=lag)
    assert (guard.alarms, guard.cleared) == ([], 2)
    assert same(model.state_dict(), contrasted(data, start=15, state=state)[0].state_dict())
    data[20] = torch.full_like(data[20], math.nan)
    model, guard, state = contrasted(data, start=15, policy=policy, lag=lag)
    assert [(alarm.step, alarm.action) for alarm in guard.alarms] == [(20, "skipped")]
    expected = contrasted(data, leave_out=[20], start=15, state=state)[0]
    assert same(model.state_dict(), expected.state_dict())


@pytest.mark.parametrize("lag", [0, 2])
def test_weights_that_the_loop_writes_are_as_without_the_guard(lag):
    """A target network is synced at the loop's top, also before a step that is left out or looked into."""
    torch.manual_seed(3)
    data = [torch.randn(16, 8) for _ in range(60)]
    data[20], data[30] = torch.full_like(data[20], math.nan), data[30] * 2.2

    def loss_of(model, batch):
        online, target = model
        wanted = batch[:, :4] + 0.5 * target(batch.flip(0))
        return (online(batch) - wanted).square().mean()

    def trained(is_guarded):
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
        model[1].requires_grad_(False)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01, fused=True)
        guard = None
        if is_guarded:
            guard = Guard(model, optimizer, loss_of=loss_of, policy=GuardPolicy(loss_factor=None), lag=lag)
        for step, batch in enumerate(data if guard is None else guard.batches(data)):
            step = step if guard is None else guard.steps
            if step % 10 == 0:
                model[1].load_state_dict(model[0].state_dict())
            loss = loss_of(model, batch)
            loss.backward()
            if guard is not None:
                guard.step(loss)
                continue
            if step != 20:
                optimizer.step()
            optimizer.zero_grad()
        return model, guard

    model, guard = trained(True)
    assert ([alarm.step for alarm in guard.alarms], guard.cleared) == ([20], 1)
    assert same(model.state_dict(), trained(False)[0].state_dict())


def test_a_discriminator_that_is_frozen_behind_its_update_keeps_it():
    """The guard watches the generator. A step that is made again has the discriminator's update twice."""
    torch.manual_seed(3)
    data = [torch.randn(16, 8) for _ in range(60)]
    broken, suspected = data[20], data[30]

    def loss_of(model, noise):
        made, judge = model
        loss = nn.functional.softplus(-judge(made(noise))).mean()
        return loss * (math.nan if noise is broken else 4.0 if noise is suspected else 1.0)

    def trained(is_guarded):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(8, 4), nn.Linear(4, 1)])
        first, second = (torch.optim.SGD(part.parameters(), lr=0.01) for part in model)
        guard = None
        if is_guarded:
            guard = Guard(model, first, loss_of=loss_of, policy=GuardPolicy(loss_factor=None))
        given = data if guard is not None else [*data[:31], *data[30:]]
        for step, noise in enumerate(given if guard is None else guard.batches(given)):
            model[1].requires_grad_(True)
            real, fake = model[1](noise[:, :4] + 2), model[1](model[0](noise).detach())
            nn.functional.softplus(torch.cat([-real, fake])).mean().backward()
            second.step()
            second.zero_grad()
            model[1].requires_grad_(False)
            loss = loss_of(model, noise)
            loss.backward()
            if guard is not None:
                guard.step(loss)
                continue
            if step not in (20, 30):
                first.step()
            first.zero_grad()
        return model, guard

    model, guard = trained(True)
    assert ([alarm.step for alarm in guard.alarms], guard.cleared) == ([20], 1)
    assert same(model.state_dict(), trained(False)[0].state_dict())


@pytest.mark.parametrize("broken", [(), (25,), tuple(range(25, 30))])
def test_what_goes_with_the_updates_is_as_without_the_broken_batches(broken):
    """A second optimizer over the same model, and an average of its weights."""
    torch.manual_seed(2)
    data = [torch.randn(16, 8) for _ in range(60)]
    data[45] = data[45] * 2.2  # looked into

    def loss_of(model, batch):
        return (model(batch) - batch.sum(-1, keepdim=True)).square().mean()

    def trained(is_guarded):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        first = torch.optim.SGD(model[0].parameters(), lr=0.01, momentum=0.9)
        second = torch.optim.AdamW(model[2].parameters(), lr=1e-3)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        guard = None
        if is_guarded:
            given = [batch * math.nan if step in broken else batch for step, batch in enumerate(data)]
            policy = GuardPolicy(loss_factor=None, snapshot_interval=20)
            others = {"second": second, "average": average}
            guard = Guard(model, first, loss_of=loss_of, policy=policy, others=others)
        else:
            given = [batch for step, batch in enumerate(data) if step not in broken]
        for batch in given if guard is None else guard.batches(given):
            loss = loss_of(model, batch)
            loss.backward()
            if guard is None:
                first.step()
                first.zero_grad()
            if guard is None or not guard.step(loss).found_inf:
                second.step()
                average.update_parameters(model)
            second.zero_grad()
        return guard, [each.state_dict() for each in (model, second, average)]

    guard, state = trained(True)
    assert [alarm.step for alarm in guard.alarms] == list(broken)
    assert guard.cleared == 1
    assert same(state, trained(False)[1])


def test_a_guard_leaves_gradients_to_another():
    """It forgets those of its own optimizer alone, also where it looks into a step."""
    torch.manual_seed(2)
    data = [torch.randn(16, 8) for _ in range(30)]
    data[12] = data[12] * 3.2
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss_of(model, batch):
        return (model(batch) - batch.sum(-1, keepdim=True)).square().mean()

    policy = GuardPolicy(loss_factor=None)
    first = Guard(model, torch.optim.SGD(model[0].parameters(), lr=0.01), loss_of=loss_of, policy=policy)
    second = Guard(model, torch.optim.SGD(model[2].parameters(), lr=0.01), policy=policy)
    for batch in first.batches(data):
        loss = loss_of(model, batch)
        loss.backward()
        first.step(loss)
        second.step(loss)
    assert first.cleared >= 1

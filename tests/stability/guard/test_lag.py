"""What the host learns late, and what is done without batches or snapshots."""

import math
import weakref

import pytest
import torch

from stackwise.stability.guard import Guard, GuardError, GuardPolicy
from tests.late_copies import late_copies
from tests.stability.guard.guarded_run import (
    FAULTS,
    OPTIMIZERS,
    POLICY,
    N,
    Small,
    element,
    guarded,
    loss_of,
    make_data,
    plain,
    same,
)


@pytest.mark.parametrize("lag", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("optimizer", ["fused adamw", pytest.param("fused sgd", marks=pytest.mark.slow)])
def test_what_the_host_learns_late_ends_the_same(optimizer, name, lag):
    fault = FAULTS[name](60)[0]
    at_once = guarded(optimizer, fault, dropout=0.1)
    random_state = torch.get_rng_state()
    late = guarded(optimizer, fault, dropout=0.1, lag=lag)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert repr(late.guard.alarms) == repr(at_once.guard.alarms)
    assert same(late.state, at_once.state)
    assert late.guard.quarantined == at_once.guard.quarantined
    assert late.guard.steps == at_once.guard.steps == N
    assert len(late.seen) > len(at_once.seen)


def test_the_host_waits_for_the_step_so_many_before_and_for_no_later_one(monkeypatch):
    expected = guarded("fused adamw", lag=3)
    waits = late_copies(monkeypatch)
    late = guarded("fused adamw", lag=3)
    # Those at the end of the epoch apart.
    assert waits[:-3] == [3] * (N - 3)
    assert same(late.state, expected.state)


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("step", [0, 97, 98, 99])
def test_the_ends_of_an_epoch(step, lag):
    run = guarded("fused sgd", element(math.nan, step, step + N), lag=lag, epochs=2)
    assert [alarm.batch for alarm in run.guard.alarms] == [((0, step),), ((1, step),)]
    data = make_data()
    assert same(run.state, plain("fused sgd", data=data + data, leave_out=[step, step + N]).state)


def test_a_late_rewind_is_no_further_than_the_interval():
    run = guarded("fused adamw", element(math.nan, *range(58, 68)), lag=3)
    backward = [a + 1 - b for a, b in zip(run.seen, run.seen[1:], strict=False) if b <= a]
    assert max(backward) <= POLICY.snapshot_interval
    assert run.guard.steps == N


@pytest.mark.parametrize(
    "step", [22, 24, *(pytest.param(step, marks=pytest.mark.slow) for step in (20, 21, 23, 25))]
)
def test_late_alarms_around_a_snapshot(step):
    # Snapshots are due every 20 - 5 - 3 steps, here at 24: one is taken behind the broken step before the
    # host knows.
    fault = element(math.nan, *range(step, step + 6))
    late = guarded("fused sgd", fault, lag=3, dropout=0.1)
    assert same(late.state, guarded("fused sgd", fault, dropout=0.1).state)


@pytest.mark.parametrize("lag", [0, 2])
def test_without_snapshots_batches_are_not_kept(lag):
    data = make_data()
    watched = [weakref.ref(batch[0]) for batch in data]
    run = guarded(
        "fused sgd",
        element(math.nan, 30),
        data=(data.pop(0) for _ in range(N)),
        policy=GuardPolicy(snapshot_interval=None),
        lag=lag,
        watch=lambda run, step: run.kept.update({step: sum(each() is not None for each in watched)}),
    )
    assert run.guard.quarantined == [(0, 30)]
    # Those to come, and few of those that were.
    assert all(alive <= N - step + 3 + 2 * lag for step, alive in run.kept.items())


@pytest.mark.parametrize("lag", [0, 3])
def test_without_batches_steps_are_left_out_all_the_same(lag):
    torch.manual_seed(0)
    model, twin = Small(), Small()
    twin.load_state_dict(model.state_dict())
    optimizer, other = (OPTIMIZERS["fused sgd"](m.parameters()) for m in (model, twin))
    guard = Guard(model, optimizer, lag=lag)
    for step, batch in enumerate(make_data()):
        for m in (model, twin) if step not in (0, 60, 61) else (model,):
            loss_of(m, batch).backward()
        if step in (60, 61, 0):
            model.head.bias.grad[0] = math.nan
        else:
            other.step()
            other.zero_grad()
        guard.step(loss_of(model.eval(), batch))
        model.train()
    guard.settle()
    assert [alarm.step for alarm in guard.alarms] == [0, 60, 61]
    assert guard.alarms[0].batch is None
    assert same(model.state_dict(), twin.state_dict())


def test_without_batches_a_lasting_fault_stops_it():
    torch.manual_seed(0)
    model = Small()
    guard = Guard(model, OPTIMIZERS["adamw"](model.parameters()))

    def train():
        for step, batch in enumerate(make_data()):
            loss = loss_of(model, batch) * (1 if step < 50 else math.nan)
            loss.backward()
            guard.step(loss)

    with pytest.raises(GuardError):
        train()
    assert guard.steps == 56

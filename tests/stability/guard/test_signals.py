"""What is judged, and what is clipped."""

import math

import pytest
import torch
from torch import nn

from stackwise.stability.guard import Guard, GuardPolicy
from tests.stability.guard.guarded_run import (
    OPTIMIZERS,
    N,
    Small,
    element,
    guarded,
    loss_of,
    make_data,
    plain,
    same,
    times,
)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "fused adamw", "fused sgd"])
def test_clipping_is_that_of_torch(optimizer):
    run = guarded(optimizer, policy=GuardPolicy(clip=0.6))

    def clip(twin, step):
        nn.utils.clip_grad_norm_(twin.model.parameters(), 0.6)

    twin = plain(optimizer, clip)
    for a, b in zip(run.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    divisors = [record.divisor for record in run.guard.records()]
    assert max(divisors) > 1.0 == min(divisors)
    assert run.guard.alarms == []


def test_first_spikes_may_be_clipped_to_the_level():
    norms = {}

    def watch(run, step):
        if step == 61:
            norms.update({r.step: r for r in run.guard.records()})

    run = guarded("sgd", times(10, 60, 61, 62), policy=GuardPolicy(spikes_clipped=2), watch=watch)
    assert [(a.step, a.action) for a in run.guard.alarms] == [
        (60, "clipped"),
        (61, "clipped"),
        (62, "skipped"),
    ]
    level = sorted(norms[step].total_norm for step in range(52, 60))
    assert norms[60].total_norm / norms[60].divisor == pytest.approx(math.sqrt(level[3] * level[4]), rel=1e-5)
    assert run.guard.quarantined == [(0, 62)]
    assert run.scheduler.last_epoch == N - 1
    nan = guarded("sgd", element(math.nan, 60), policy=GuardPolicy(spikes_clipped=2))
    assert [a.action for a in nan.guard.alarms] == ["skipped"]


def test_loss_and_logits_are_signals():
    torch.manual_seed(0)
    model = Small()
    guard = Guard(model, OPTIMIZERS["sgd"](model.parameters()), policy=GuardPolicy(logit_limit=80.0))
    for step, batch in enumerate(make_data(count=70)):
        loss = loss_of(model, batch)
        loss.backward()
        logit = torch.tensor({40: 900.0, 50: 90.0}.get(step, 30.0))
        guard.step(loss * 4 if step == 30 else loss, logit=logit)
    found = [(a.step, a.kind, a.value) for a in guard.alarms]
    assert [f[:2] for f in found] == [(30, "loss spike"), (40, "logit growth"), (50, "logit growth")]
    assert guard.alarms[1].limit == pytest.approx(80.0)
    assert found[2][2] == 90.0
    records = guard.records()
    assert [records[step].logit for step in (39, 40, 50)] == [30.0, 900.0, 90.0]
    assert records[40].logit_limit == pytest.approx(80.0)
    assert records[30].loss > records[30].loss_limit > records[29].loss
    assert records[0].loss_limit == math.inf


def test_a_limit_of_logits_that_never_come_is_told_of_once():
    torch.manual_seed(0)
    model = Small()
    policy = GuardPolicy(logit_limit=80.0)
    guard = Guard(model, OPTIMIZERS["sgd"](model.parameters()), policy=policy)

    def train(guard, logit=None):
        for batch in make_data(count=6):
            loss = loss_of(model, batch)
            loss.backward()
            guard.step(loss, logit=logit)
            logit = None

    with pytest.warns(RuntimeWarning, match=r"logit_limit: got 80\.0, and no attention logit in 4 steps"):
        train(guard)
    train(guard)
    # Of some steps only is enough.
    train(Guard(model, guard.optimizer, policy=policy), torch.tensor(1.0))


def test_signals_can_be_left_out():
    torch.manual_seed(0)
    model = Small()
    policy = GuardPolicy(loss_factor=None, logit_factor=None)
    guard = Guard(model, OPTIMIZERS["sgd"](model.parameters()), policy=policy)
    for step, batch in enumerate(make_data(count=50)):
        loss = loss_of(model, batch)
        loss.backward()
        guard.step(loss * (40 if step == 30 else 1), logit=torch.tensor(1e6 if step == 35 else 1.0))
    assert guard.alarms == []


def own_spikes(factor, *steps):
    """Data, and a loss that its batches at `steps` multiply by `factor`."""
    data = make_data()
    spiking = {id(data[step]) for step in steps}

    def compute(model, batch):
        return loss_of(model, batch) * (factor if id(batch) in spiking else 1)

    return {"data": data, "loss_of": compute}


def test_a_rare_source_with_larger_gradients_raises_no_alarm():
    run = guarded("adamw", **own_spikes(4, *range(20, N, 5)))
    assert (run.guard.alarms, run.guard.quarantined) == ([], [])
    assert run.guard.cleared > 0


def test_consecutive_huge_gradients_of_batches_are_all_skipped():
    run = guarded("sgd", **own_spikes(1000, *range(60, 64)))
    assert [a.step for a in run.guard.alarms] == [60, 61, 62, 63]


def test_a_huge_gradient_of_a_batch_is_learned_after_the_row():
    run = guarded("adamw", **own_spikes(1000, 60, 80))
    assert [a.step for a in run.guard.alarms] == [60]


def test_a_lasting_change_of_the_data_does_not_stop_training():
    run = guarded("adamw", **own_spikes(1000, *range(60, N)))
    assert run.error is None
    assert [a.step for a in run.guard.alarms] == list(range(60, 71))
    assert [a.action for a in run.guard.alarms].count("rewound") == 1


def test_a_spike_that_cannot_be_recomputed_is_skipped_once():
    run = guarded("fused adamw", times(10, *range(60, N)))
    assert run.error is None
    assert [(a.step, a.kind, a.action) for a in run.guard.alarms] == [(60, "gradient spike", "skipped")]


@pytest.mark.parametrize("lag", [1, 4])
def test_spikes_are_remembered_alike_with_a_lag(lag):
    at_once, late = (guarded("fused adamw", times(50, 40, 41, 60), lag=each) for each in (0, lag))
    assert repr(late.guard.alarms) == repr(at_once.guard.alarms) != "[]"
    assert same(late.state, at_once.state)


@pytest.mark.parametrize("lag", [1, 4])
def test_recomputed_spikes_are_remembered_alike_with_a_lag(lag):
    spikes = own_spikes(1000, 40, 41, 60)
    at_once, late = (guarded("fused adamw", lag=each, **spikes) for each in (0, lag))
    assert repr(late.guard.alarms) == repr(at_once.guard.alarms) != "[]"
    assert same(late.state, at_once.state)

"""Guard with a GradScaler: what the scaler answers is no alarm, and an alarm is nothing to the scaler."""

import copy
import math

import pytest
import torch
from torch import nn

from stackwise.stability.guard import Guard, GuardError, GuardPolicy
from stackwise.stability.guard.diagnosis import Bundle

N = 60
POLICY = GuardPolicy(snapshot_interval=8, patience=3)
KINDS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


def data(broken_at=()):
    generator = torch.Generator().manual_seed(7)
    batches = list(torch.randn(N, 128, 4, generator=generator))
    for at in broken_at:
        batches[at] = torch.full_like(batches[at], math.nan)
    return batches


def loss_of(model, batch):
    return (model(batch) - batch.sum(-1, keepdim=True)).square().mean()


class Run:
    def __init__(self, kind, init_scale=2.0**16, growth_interval=10):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = KINDS[kind](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step / 50))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)

    def backward(self, batch, overflows):
        """Gradients that overflow while the scale is above a value, as those in float16 do."""
        loss = loss_of(self.model, batch)
        self.scaler.scale(loss).backward()
        if overflows is not None and self.scaler.get_scale() > overflows:
            self.model[1].weight.grad[0, 0] = math.inf
        return loss

    @property
    def state(self):
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict()["state"],
                "rate": self.scheduler.get_last_lr(),
                "scaler": self.scaler.state_dict(),
            }
        )


def guarded(kind, *, broken_at=(), overflows=None, policy=POLICY, watch=None, **arguments):
    run = Run(kind, **arguments)
    run.guard = Guard(
        run.model, run.optimizer, scheduler=run.scheduler, policy=policy, loss_of=loss_of, scaler=run.scaler
    )
    for batch in run.guard.batches(data(broken_at)):
        loss = run.backward(batch, overflows)
        run.guard.step(loss)
        if watch is not None:
            watch(run)
    return run


def plain(kind, *, leave_out=(), overflows=None, **arguments):
    """By torch's own recipe; the schedule waits for updates."""
    run = Run(kind, **arguments)
    for number, batch in enumerate(data()):
        if number in leave_out:
            continue
        run.backward(batch, overflows)
        scale = run.scaler.get_scale()
        run.scaler.step(run.optimizer)
        run.scaler.update()
        if run.scaler.get_scale() >= scale:
            run.scheduler.step()
        run.optimizer.zero_grad()
    return run


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overflows", [None, 2.0**15, 2.0**9])
def test_an_overflow_is_no_alarm(kind, overflows):
    run = guarded(kind, overflows=overflows)
    assert run.guard.alarms == []
    twin = plain(kind, overflows=overflows)
    assert same(run.state, twin.state)
    records = run.guard.records()
    assert [record.kind for record in records] == [None] * N
    assert sum(record.skipped for record in records) == N - run.scheduler.last_epoch
    assert (run.scheduler.last_epoch < N) is (overflows is not None)
    assert run.guard.skipped == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [(0,), (9,), (30,), (43, 44, 45), (59,)], ids=str)
def test_an_alarm_is_nothing_to_the_scaler(kind, at):
    run = guarded(kind, broken_at=at)
    assert [alarm.step for alarm in run.guard.alarms] == list(at)
    assert {alarm.kind for alarm in run.guard.alarms} == {"non-finite loss"}
    assert same(run.state, plain(kind, leave_out=at).state)


def test_a_rewind_takes_the_scale_back():
    # An overflow between the snapshot and the alarms is made again as well.
    run = guarded("adamw", broken_at=(46, 47, 48), growth_interval=4, overflows=2.0**16)
    assert [alarm.action for alarm in run.guard.alarms] == ["skipped", "skipped", "rewound"]
    twin = plain("adamw", leave_out=(46, 47, 48), growth_interval=4, overflows=2.0**16)
    assert same(run.state, twin.state)


def test_what_no_scale_mends_is_an_alarm():
    with pytest.raises(GuardError) as caught:
        guarded("adamw", overflows=0.0, init_scale=4.0, policy=GuardPolicy(snapshot_interval=None))
    assert {alarm.kind for alarm in caught.value.alarms} == {"non-finite gradient"}
    assert caught.value.alarms[0].step == 2  # after 4 and 2


def test_norms_are_those_of_the_loss():
    scaled = guarded("sgd").guard.records()
    alone = Run("sgd")
    guard = Guard(alone.model, alone.optimizer, scheduler=alone.scheduler, policy=POLICY)
    for batch in guard.batches(data()):
        loss = loss_of(alone.model, batch)
        loss.backward()
        guard.step(loss)
    for a, b in zip(scaled, guard.records(), strict=True):
        assert a.total_norm == pytest.approx(b.total_norm, rel=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "fused"])
def test_clipping_divides_what_is_unscaled(kind):
    run = guarded(kind, policy=GuardPolicy(clip=0.5))
    twin = Run(kind)
    for batch in data():
        twin.backward(batch, None)
        twin.scaler.unscale_(twin.optimizer)
        nn.utils.clip_grad_norm_(twin.model.parameters(), 0.5)
        twin.scaler.step(twin.optimizer)
        twin.scaler.update()
        twin.scheduler.step()
        twin.optimizer.zero_grad()
    for a, b in zip(run.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert same(run.state["scaler"], twin.state["scaler"])


def test_a_loss_in_float16_puts_no_sound_batch_into_quarantine():
    def half(model, batch):
        return (loss_of(model, batch) / 8 + 2.0).half()  # times the scale above what float16 holds

    run = Run("sgd", init_scale=2.0**15, growth_interval=1000)
    guard = Guard(run.model, run.optimizer, policy=POLICY, loss_of=half, scaler=run.scaler)
    for batch in guard.batches(data()):
        loss = half(run.model, batch)
        run.scaler.scale(loss).backward()
        # What breaks it is not in the batch: it does not come again.
        guard.step(loss * math.nan if guard.steps == 30 and not guard.alarms else loss)
    [alarm] = guard.alarms
    assert (alarm.step, alarm.kind, alarm.action) == (30, "non-finite loss", "retried")
    assert alarm.reproduced is False
    assert guard.quarantined == []


def test_a_bundle_tells_the_scale_of_its_step(tmp_path):
    run, scales = Run("sgd"), []
    guard = Guard(run.model, run.optimizer, loss_of=loss_of, scaler=run.scaler, bundles=tmp_path)
    for batch in guard.batches(data((30,))):
        scales.append(run.scaler.get_scale())
        guard.step(run.backward(batch, None))
    [alarm] = guard.alarms
    assert Bundle.read(alarm.bundle).loss_scale == scales[30] > 2.0**16


def test_its_state_is_kept():
    first = guarded("adamw", overflows=2.0**12)
    state = first.guard.state_dict()
    other = Run("adamw")
    guard = Guard(other.model, other.optimizer, scheduler=other.scheduler, scaler=other.scaler)
    guard.load_state_dict(state)
    assert other.scaler.state_dict() == first.scaler.state_dict()
    assert other.scaler.get_scale() < 2.0**16


def test_what_is_refused():
    run = Run("fused")
    with pytest.raises(ValueError, match="lag: got 2; allowed: 0 with a scaler"):
        Guard(run.model, run.optimizer, scaler=run.scaler, lag=2)
    with pytest.raises(ValueError, match="others: got 'scaler'; allowed: other names"):
        Guard(run.model, run.optimizer, scaler=run.scaler, others={"scaler": run.scheduler})
    off = torch.amp.GradScaler("cpu", enabled=False)
    assert Guard(run.model, run.optimizer, scaler=off, lag=2).state_dict()["scaler"] is None

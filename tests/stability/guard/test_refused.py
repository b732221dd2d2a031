"""What is refused, what is written, and what records hold."""

import json
import math

import pytest
import torch
from torch import nn

from stackwise.stability.faults import DiskFull
from stackwise.stability.guard import Guard, GuardPolicy
from tests.stability.guard.guarded_run import (
    OPTIMIZERS,
    POLICY,
    N,
    Small,
    guarded,
    loss_of,
    make_data,
    plain,
    same,
    times,
)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: torch.optim.AdamW(p), r"param_groups\[0\]\['fused'\]: got .*; allowed: True.*lag=0"),
        (lambda p: torch.optim.RMSprop(p), r"optimizer: got 'RMSprop'; allowed: .*fused=True.*lag=0"),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
            r"dampening.*got 0.5",
        ),
    ],
)
def test_optimizers_that_cannot_leave_a_step_out_by_themselves(make, message):
    model = Small()
    with pytest.raises(ValueError, match=message):
        Guard(model, make(model.parameters()), lag=1)
    Guard(model, make(model.parameters()))


def test_what_is_refused():
    model = Small()
    optimizer = OPTIMIZERS["fused sgd"](model.parameters())
    with pytest.raises(ValueError, match=r"gradients: got 'none'; allowed: backward\(\) before step\(\)"):
        Guard(model, optimizer).step(torch.tensor(1.0))
    with pytest.raises(ValueError, match="lag: got -1"):
        Guard(model, optimizer, lag=-1)
    loss = loss_of(model, make_data(count=1)[0])
    loss.backward()
    with pytest.raises(ValueError, match=r"loss: got \(2,\); allowed: one element"):
        Guard(model, optimizer).step(torch.zeros(2))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with pytest.raises(ValueError, match=r"scheduler: got 'LambdaLR'; allowed: none, or guard.batches"):
        Guard(model, optimizer, scheduler=scheduler, lag=2).step(loss)
    follows = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="scheduler: got 'ReduceLROnPlateau'; allowed: one whose step"):
        Guard(model, optimizer, scheduler=follows)
    with pytest.raises(ValueError, match="optimizer: got 'LBFGS'; allowed: one whose step"):
        Guard(model, torch.optim.LBFGS(model.parameters()))
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    guard = Guard(lazy, torch.optim.SGD(lazy[1].parameters(), lr=1.0))
    allowed = r"parameters: got \['0.weight', '0.bias'\]; allowed: all with a shape"
    with pytest.raises(ValueError, match=allowed):
        next(guard.batches([torch.zeros(2, 3)]))
    meta = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, device="meta"))]
    with pytest.raises(ValueError, match=r"parameters: got .*'cpu', 'meta'"):
        Guard(nn.ParameterList(meta), torch.optim.SGD(meta, lr=1.0))


def test_an_optimizer_of_another_kind():
    torch.manual_seed(0)
    model = Small()
    guard = Guard(model, torch.optim.Adagrad(model.parameters(), lr=0.05), policy=POLICY)
    for batch in guard.batches(make_data()):
        loss = loss_of(model, batch)
        loss.backward()
        if guard.steps == 50:
            model.head.bias.grad[:] = math.nan
        guard.step(loss)
    assert [alarm.step for alarm in guard.alarms] == [50]
    assert all(p.isfinite().all() for p in model.parameters())


def test_records_are_what_was_computed():
    run = guarded("sgd", times(10, 60))
    records = run.guard.records()
    assert [record.step for record in records] == list(range(N))
    assert [record.step for record in records if record.skipped] == [60]
    assert records[60].kind == "gradient spike"
    assert records[60].total_norm > records[60].limit
    assert [record.loss for record in records] == pytest.approx(run.losses)
    norms = records[10].parameter_norms
    assert list(norms) == [name for name, _ in run.model.named_parameters()]
    assert math.hypot(*norms.values()) == pytest.approx(records[10].total_norm, rel=1e-5)
    assert run.guard.records() == []
    json.dumps(records[0].to_dict())


def test_the_snapshot_is_one_state():
    run = guarded("adamw")
    tensors = [*run.model.parameters(), *run.model.buffers()]
    tensors += [t for s in run.optimizer.state.values() for t in s.values()]
    assert run.guard.snapshot_bytes <= sum(t.numel() * t.element_size() for t in tensors)


def test_a_bundle_that_cannot_be_written_stops_nothing(tmp_path):
    data = make_data()
    data[30] = (data[30][0], torch.full_like(data[30][1], -100))
    for number in (1, 2):  # the folder of the run before is there
        [alarm] = guarded("sgd", data=data, loss_of=loss_of, bundles=tmp_path).guard.alarms
        assert alarm.bundle == str(tmp_path / f"step-00000030-{number}")
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="no diagnostic bundle of step 30: .*Not a directory"):
        run = guarded("sgd", data=data, loss_of=loss_of, bundles=tmp_path / "file")
    assert [alarm.bundle for alarm in run.guard.alarms] == [""]
    assert run.guard.quarantined == [(0, 30)]
    full = DiskFull(step=0, folder=tmp_path / "full", after=100).around_saves(lambda: None)
    with full, pytest.warns(UserWarning, match="no diagnostic bundle of step 30: .*No space left"):
        guarded("sgd", data=data, loss_of=loss_of, bundles=tmp_path / "full")
    assert list((tmp_path / "full").iterdir()) == []


def test_bundles_are_written(tmp_path):
    from stackwise.stability.guard.diagnosis import Bundle, replay

    data = make_data()
    data[30] = (data[30][0], torch.full_like(data[30][1], -100))
    run = guarded("sgd", data=data, loss_of=loss_of, bundles=tmp_path)
    [alarm] = run.guard.alarms
    assert alarm.bundle == str(tmp_path / "step-00000030-1")
    bundle = Bundle.read(alarm.bundle)
    assert bundle.alarm["step"] == 30
    assert bundle.batches[0].id == (0, 30)
    assert same(bundle.batches[0].batch, data[30])
    weights = plain("sgd", data=data, before=30).model.state_dict()
    assert same(dict(bundle.weights), weights)
    found = replay(bundle, Small(), loss_of)
    assert math.isnan(found.loss)
    assert found.where == alarm.where
    lasting = guarded(
        "sgd",
        element(math.nan, *range(60, N)),
        bundles=tmp_path / "more",
        policy=GuardPolicy(bundle_weights=False),
    )
    _first, *_, last = lasting.guard.alarms
    assert lasting.error.alarm.bundle == last.bundle
    assert {p.name for p in (tmp_path / "more").iterdir()} == {
        "step-00000060-1",
        "step-00000065-2",
        "step-00000070-3",
    }
    assert Bundle.read(last.bundle).weights is None
    assert "Diagnosis: " in str(lasting.error)


@pytest.mark.parametrize("gives", [True, False])
def test_lazy_modules_are_trained_where_no_snapshot_is_taken(gives):
    torch.manual_seed(0)
    data = torch.randn(40, 8, 3)
    data[20] = math.nan
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))
    policy = GuardPolicy(snapshot_interval=None)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), policy=policy)
    for batch in guard.batches(data) if gives else data:
        loss = model(batch).square().mean()
        loss.backward()
        guard.step(loss)
    assert [alarm.step for alarm in guard.alarms] == [20]

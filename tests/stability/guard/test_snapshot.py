"""Snapshot: everything comes back bit for bit into the same tensors, and it holds no more than one state."""

import copy

import pytest
import torch
from torch import nn

from stackwise.stability.guard.snapshot import Moment, Snapshot

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.norm(self.embedding(ids)))


def train(model, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(7, (16,), generator=generator)
        nn.functional.cross_entropy(model(ids), ids.roll(1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def state(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 3])
def test_everything_comes_back(name, before):
    model = Tied()
    optimizer = OPTIMIZERS[name](model.parameters())
    snapshot = Snapshot(model, optimizer)
    train(model, optimizer, 1, seed=9)  # an older one is written over
    snapshot.take()
    train(model, optimizer, before, seed=1)
    snapshot.take()
    moment, wanted = Moment(optimizer, None), state(model, optimizer)
    tensors = [*model.parameters(), *model.buffers()]
    train(model, optimizer, 4, seed=2)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(9.0) if name == "tensor rate" else 9.0
    assert not same(state(model, optimizer), wanted)
    snapshot.restore()
    moment.restore(optimizer, None)
    assert same(state(model, optimizer), wanted)
    assert all(a is b for a, b in zip(tensors, [*model.parameters(), *model.buffers()], strict=True))
    # It is a copy still: what follows does not reach it.
    train(model, optimizer, 2, seed=3)
    snapshot.restore()
    moment.restore(optimizer, None)
    assert same(state(model, optimizer), wanted)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_that_was_not_there_is_dropped(name):
    model = Tied()
    optimizer = OPTIMIZERS[name](model.parameters())
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    wanted = state(model, optimizer)
    train(model, optimizer, 2, seed=0)
    snapshot.restore()
    assert same(state(model, optimizer), wanted)
    train(model, optimizer, 2, seed=0)  # and it can be trained again


def test_state_that_is_gone_comes_back():
    model = Tied()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 2, seed=0)
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    wanted = state(model, optimizer)
    optimizer.state.clear()
    snapshot.restore()
    assert same(state(model, optimizer), wanted)


def test_it_holds_one_state():
    model = Tied()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 1, seed=0)
    snapshot = Snapshot(model, optimizer)
    for _ in range(3):
        snapshot.take()
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [t for s in optimizer.state.values() for t in s.values()]
    assert snapshot.nbytes == sum(t.numel() * t.element_size() for t in tensors)


def test_the_copies_are_written_over():
    model = Tied()
    optimizer = OPTIMIZERS["plain"](model.parameters())
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    places = {key: value.data_ptr() for key, value in snapshot._kept.items()}
    train(model, optimizer, 1, seed=0)
    snapshot.take()
    assert {key: value.data_ptr() for key, value in snapshot._kept.items()} == places


def test_weights_that_only_the_optimizer_has():
    model, outside = nn.Linear(2, 2), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=1.0)
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    with torch.no_grad():
        outside.zero_()
    snapshot.restore()
    assert outside.tolist() == [1, 1, 1]


def test_another_shape_is_refused():
    model = nn.BatchNorm1d(3)
    snapshot = Snapshot(model, torch.optim.SGD(model.parameters(), lr=1.0))
    snapshot.take()
    model.running_mean = torch.zeros(1)
    with pytest.raises(ValueError, match=r"buffer running_mean: got \(1,\); allowed: \(3,\), as it was"):
        snapshot.restore()


def test_scheduler_rates_and_others_come_back():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=20)
    other = torch.nn.Linear(1, 1)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    moment = Moment(optimizer, scheduler, {"other": other})
    wanted = copy.deepcopy((scheduler.state_dict(), optimizer.param_groups[0]["lr"], other.state_dict()))
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        other.weight.zero_()
    optimizer.param_groups[0]["added"] = 1
    for _ in range(2):
        moment.restore(optimizer, scheduler, {"other": other})
        found = (scheduler.state_dict(), optimizer.param_groups[0]["lr"], other.state_dict())
        assert same(found[1:], wanted[1:])
        assert found[0]["last_epoch"] == wanted[0]["last_epoch"] == 3
        assert "added" not in optimizer.param_groups[0]
        scheduler.step()

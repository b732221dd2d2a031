"""Snapshot: everything comes back bit for bit into the same tensors, and it holds no more than one state."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from stackwise.stability.guard.snapshot import Moment, Snapshot
from tests.optimizer_kinds import Contained, WithLayout

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
def test_model_and_optimizer_are_restored_exactly(name, before):
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
def test_state_created_after_the_snapshot_is_dropped(name):
    model = Tied()
    optimizer = OPTIMIZERS[name](model.parameters())
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    wanted = state(model, optimizer)
    train(model, optimizer, 2, seed=0)
    snapshot.restore()
    assert same(state(model, optimizer), wanted)
    train(model, optimizer, 2, seed=0)  # and it can be trained again


def test_deleted_state_is_restored():
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


def test_snapshot_reuses_its_buffers():
    model = Tied()
    optimizer = OPTIMIZERS["plain"](model.parameters())
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    places = {key: value.tensor.data_ptr() for key, value in snapshot._kept.items()}
    train(model, optimizer, 1, seed=0)
    snapshot.take()
    assert {key: value.tensor.data_ptr() for key, value in snapshot._kept.items()} == places


def test_weights_only_in_the_optimizer_are_restored():
    model, outside = nn.Linear(2, 2), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=1.0)
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    with torch.no_grad():
        outside.zero_()
    snapshot.restore()
    assert outside.tolist() == [1, 1, 1]


def test_state_in_containers_is_restored_repeatedly():
    """As where preconditioners are a list, which the optimizer changes in place."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.state[model.weight]["factors"] = [torch.ones(2), {"side": torch.ones(2)}]
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    for _ in range(2):
        factors = optimizer.state[model.weight]["factors"]
        factors[0].add_(1)
        factors[1]["side"].add_(1)
        snapshot.restore()
        assert same(optimizer.state[model.weight]["factors"], [torch.ones(2), {"side": torch.ones(2)}])


def test_parameter_of_changed_shape_is_refused_before_any_restore():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    snapshot = Snapshot(model, torch.optim.SGD(model[:1].parameters(), lr=1.0))
    snapshot.take()
    with torch.no_grad():
        model[0].weight.zero_()
    model[1].bias = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"parameter 1\.bias: got \(2,\); allowed: \(1,\), the shape"):
        snapshot.restore()
    assert not model[0].weight.any()


def test_new_or_resized_tensors_are_left_unchanged():
    """Tables that are computed for the longest input so far, and weights that nobody trains."""
    model = nn.Module()
    model.linear = nn.Linear(2, 2)
    model.register_buffer("table", torch.zeros(4))
    snapshot = Snapshot(model, torch.optim.SGD(model.linear.parameters(), lr=1.0))
    snapshot.take()
    weight = model.linear.weight.detach().clone()
    with torch.no_grad():
        model.linear.weight.zero_()
    model.table = torch.ones(6)
    model.register_buffer("mask", torch.ones(3))
    model.adapter = nn.Parameter(torch.ones(2))
    snapshot.restore()
    assert torch.equal(model.linear.weight, weight)
    assert all(tensor.all() for tensor in (model.table, model.mask, model.adapter))


def test_state_of_changed_shape_is_restored():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.state[model.weight]["basis"] = torch.ones(2)
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    optimizer.state[model.weight]["basis"] = torch.zeros(3)
    for _ in range(2):
        snapshot.restore()
        assert optimizer.state[model.weight]["basis"].tolist() == [1, 1]
        optimizer.state[model.weight]["basis"].zero_()


def test_options_go_with_their_group():
    a, b, c = (nn.Parameter(torch.ones(1)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 2.0}])
    moment = Moment(optimizer, None)
    del optimizer.param_groups[0]
    optimizer.add_param_group({"params": [c], "lr": 3.0})
    optimizer.param_groups[0]["lr"] = 9.0
    moment.restore(optimizer, None)
    assert [
        (group["params"][0] is p, group["lr"])
        for p, group in zip((b, c), optimizer.param_groups, strict=True)
    ] == [
        (True, 2.0),
        (True, 3.0),
    ]


def test_scheduler_rates_and_other_objects_are_restored():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=20)
    other = torch.nn.Linear(1, 1)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    snapshot = Snapshot(model, optimizer, {"other": other})
    snapshot.take()
    moment = Moment(optimizer, scheduler, {"other": other})
    wanted = copy.deepcopy((scheduler.state_dict(), optimizer.param_groups[0]["lr"], other.state_dict()))
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        other.weight.zero_()
    optimizer.param_groups[0]["added"] = 1
    for _ in range(2):
        snapshot.restore()
        moment.restore(optimizer, scheduler, {"other": other})
        found = (scheduler.state_dict(), optimizer.param_groups[0]["lr"], other.state_dict())
        assert same(found[1:], wanted[1:])
        assert found[0]["last_epoch"] == wanted[0]["last_epoch"] == 3
        assert "added" not in optimizer.param_groups[0]
        scheduler.step()


def narrow_pair():
    """Two optimizers of a model in bfloat16; of the second some state is in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(torch.bfloat16)
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.NAdam(model[1].parameters(), lr=0.1)
    average = AveragedModel(model, use_buffers=True)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model, first, {"second": second, "average": average}


def step_of_pair(model, first, others):
    first.step()
    others["second"].step()
    others["average"].update_parameters(model)


def test_other_modules_and_optimizers_are_kept_as_the_model_is():
    model, first, others = narrow_pair()
    snapshot = Snapshot(model, first, others)
    for _ in range(2):
        step_of_pair(model, first, others)
        snapshot.take()
    moment = Moment(first, None, others)
    second, average = others["second"], others["average"]
    objects = (model, average)
    tensors = [tensor for each in objects for tensor in (*each.parameters(), *each.buffers())]
    states = [*first.state.values(), *second.state.values()]
    tensors += [value for state in states for value in state.values()]
    assert snapshot.nbytes == sum(t.numel() * t.element_size() for t in tensors)

    def states_now():
        return copy.deepcopy([each.state_dict() for each in (model, first, second, average)])

    wanted = states_now()
    assert second.state[model[1].weight]["mu_product"].dtype == torch.float32
    for _ in range(2):
        step_of_pair(model, first, others)
        second.param_groups[0]["lr"] = 9.0
        assert not same(states_now(), wanted)
        snapshot.restore()
        moment.restore(first, None, others)
        assert same(states_now(), wanted)
    assert average.n_averaged == 2


def test_second_optimizer_without_state_has_none_after_restore():
    model, first, others = narrow_pair()
    snapshot, moment = Snapshot(model, first, others), Moment(first, None, others)
    snapshot.take()
    step_of_pair(model, first, others)
    snapshot.restore()
    moment.restore(first, None, others)
    assert not others["second"].state and others["average"].n_averaged == 0


class WithMore(nn.Module):
    """Keeps something beside its tensors."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(2, 2), 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


class OfItsOwnLayout(torch.optim.SGD):
    """Has something in its state that is of no parameter."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.updates = 0

    def state_dict(self):
        return {**super().state_dict(), "updates": self.updates}

    def load_state_dict(self, state):
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})
        self.updates = state["updates"]


def test_non_tensor_state_of_other_objects_is_restored():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    more, own = WithMore(), OfItsOwnLayout(nn.Linear(2, 2).parameters())
    plain, others = copy.deepcopy(more.state_dict()), {"more": more, "own": own}
    snapshot = Snapshot(model, optimizer, others)
    snapshot.take()
    moment = Moment(optimizer, None, others)
    with torch.no_grad():
        more.linear.weight.zero_()
    more.seen, own.updates = 3, 4
    snapshot.restore()
    moment.restore(optimizer, None, others)
    assert same(more.state_dict(), plain)
    assert (more.seen, own.updates) == (0, 0)


def test_expanded_tensor_is_restored():
    model = nn.Linear(4, 1)
    model.register_buffer("scale", torch.ones(1).expand(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = Snapshot(model, optimizer)
    snapshot.take()
    assert snapshot.nbytes == 4 * (4 + 1 + 1)
    model.scale[0] = 2.0
    snapshot.restore()
    assert torch.equal(model.scale, torch.ones(4))


@pytest.mark.parametrize("place", [0, 1, 99])
def test_parameter_added_to_a_group_shifts_no_state(place):
    """As surgery does: what was there before keeps its state and options, and what is new has none."""
    model = Tied()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 2, 0)
    before = {p: copy.deepcopy(optimizer.state[p]) for p in model.parameters()}
    snapshot, moment = Snapshot(model, optimizer), Moment(optimizer, None)
    snapshot.take()
    joined = nn.Parameter(torch.ones(6, 7))
    optimizer.param_groups[0]["params"].insert(place, joined)
    joined.grad = torch.ones_like(joined)
    optimizer.param_groups[0]["lr"] = 5.0
    train(model, optimizer, 1, 1)
    snapshot.restore()
    moment.restore(optimizer, None)
    assert {p: dict(state) for p, state in optimizer.state.items()}.keys() == before.keys()
    assert all(same(dict(optimizer.state[p]), before[p]) for p in before)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_extra_state_of_the_model_is_restored():
    """As amax histories of float8 layers, which are no buffers."""
    model = nn.Sequential(WithMore(), nn.Linear(2, 2))
    snapshot = Snapshot(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model[0].seen = 3
    snapshot.take()
    for _ in range(2):
        model[0].seen = 5
        snapshot.restore()
        assert model[0].seen == 3


def test_weights_only_in_another_optimizer_are_restored():
    model, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    first, second = (torch.optim.SGD(each.parameters(), lr=1.0, momentum=0.9) for each in (model, critic))
    snapshot = Snapshot(model, first, {"second": second})
    snapshot.take()
    wanted = copy.deepcopy(critic.state_dict())
    critic(torch.ones(1, 2)).sum().backward()
    second.step()
    snapshot.restore()
    assert same(critic.state_dict(), wanted) and not second.state


@pytest.mark.parametrize("container", [Contained, WithLayout])
def test_nested_optimizer_state_is_restored_unrounded(container):
    """NAdam keeps a product in float32 beside weights in bfloat16, which `load_state_dict` would round."""
    model, first, others = narrow_pair()
    inner = others["second"]
    others["second"] = container(inner)
    snapshot, moment = Snapshot(model, first, others), None
    for _ in range(2):
        step_of_pair(model, first, others)
    snapshot.take()
    moment, wanted = Moment(first, None, others), copy.deepcopy(inner.state_dict())
    step_of_pair(model, first, others)
    inner.param_groups[0]["lr"] = 9.0
    snapshot.restore()
    moment.restore(first, None, others)
    assert same(inner.state_dict(), wanted)

"""A rewind restores weights, moments, step counters and options of any optimizer, bit for bit."""

import math
from collections import ChainMap
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from stackwise.stability.guard import Guard
from stackwise.support.optimizer_state import optimizers_in
from stackwise.training.muon import Muon
from tests.optimizer_kinds import PLACES, Contained, Held, Lookahead, Momentum, SlowWeights
from tests.stability.guard.guarded_run import POLICY, Small, loss_of, make_data, same, times

BROKEN = tuple(range(52, 57))  # the last of them rewinds to step 45


def parts(model):
    """Muon for the matrices of the layers, AdamW for the rest."""
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    return [torch.optim.Muon(matrices, lr=3e-3), torch.optim.AdamW(rest, lr=3e-3)]


class OwnGroups(Contained):
    """Hands its learning rate to inner optimizers that have groups of their own, as torchtitan's does."""

    def __init__(self, model):
        super().__init__(*parts(model))
        self.param_groups = [{"params": list(model.parameters()), "lr": 3e-3}]

    def step(self, closure=None):
        for each in self.optimizers:
            for group in each.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
        super().step()


class DuckTyped:
    """No torch optimizer at all."""

    def __init__(self, model):
        self.inner = dict(zip(("matrices", "rest"), parts(model), strict=True))

    @property
    def param_groups(self):
        return [group for each in self.inner.values() for group in each.param_groups]

    def step(self, closure=None):
        for each in self.inner.values():
            each.step()

    def zero_grad(self):
        for each in self.inner.values():
            each.zero_grad()


class Chained(DuckTyped):
    """Shows the states of its optimizers as one mapping, as Megatron's does."""

    @property
    def state(self):
        return ChainMap(*(each.state for each in self.inner.values()))


class OwnStateDict(DuckTyped):
    """Has a counter beside its optimizers, which its state dict holds."""

    def __init__(self, model):
        super().__init__(model)
        self.updates = 0

    def step(self, closure=None):
        self.updates += 1
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(1 + 1 / self.updates)
        super().step()

    def state_dict(self):
        return {"updates": self.updates, **{name: each.state_dict() for name, each in self.inner.items()}}

    def load_state_dict(self, state):
        self.updates = state["updates"]
        for name, each in self.inner.items():
            each.load_state_dict(state[name])


class StateDictOnly(DuckTyped):
    """SGD with momentum, whose state is known to its `state_dict()` alone."""

    def __init__(self, model):
        self.groups = [{"params": list(model.parameters()), "lr": 0.03}]
        self.moments = [torch.zeros_like(p) for p in model.parameters()]

    @property
    def param_groups(self):
        return self.groups

    @torch.no_grad()
    def step(self, closure=None):
        for p, moment in zip(self.groups[0]["params"], self.moments, strict=True):
            moment.mul_(0.9).add_(p.grad)
            p.sub_(self.groups[0]["lr"] * moment)

    def zero_grad(self):
        for p in self.groups[0]["params"]:
            p.grad = None

    def state_dict(self):
        return {"moments": self.moments}

    def load_state_dict(self, state):
        self.moments = state["moments"]


class SharedCounter(torch.optim.AdamW):
    """Has state that belongs to no parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        count = self.state.setdefault("count", {"updates": 0, "scale": torch.ones(())})
        count["updates"] += 1
        count["scale"].mul_(0.99)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(count["scale"] ** (1 / count["updates"]))
        super().step()


class Referred(torch.optim.Optimizer):
    """Refers to the tensors in its nested state from elsewhere, as Shampoo does."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.03})
        self.moments = []
        for p in model.parameters():
            self.state[p]["factors"] = [{"moment": torch.zeros_like(p)}]
            self.moments.append(self.state[p]["factors"][0]["moment"])

    @torch.no_grad()
    def step(self, closure=None):
        for p, moment in zip(self.param_groups[0]["params"], self.moments, strict=True):
            p.sub_(moment.mul_(0.9).add_(p.grad), alpha=self.param_groups[0]["lr"])


def accelerated(model):
    accelerator = Accelerator(cpu=True)
    with accelerator.accumulate(model):  # each step is an update, whatever ran in this process before
        return accelerator.prepare(Contained(*parts(model)))


def own_muon(model):
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    return Muon([{"params": matrices}, {"params": rest, "kind": "adamw"}], lr=3e-3)


def states(value):
    """Everything that an optimizer and those in it hold, in plain containers."""
    inner = sorted(optimizers_in(value)[:-1], key=lambda each: type(each).__name__)
    own = dict(getattr(value, "state", {}).items())
    extra = [getattr(value, name, None) for name in ("updates", "moments")]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in value.param_groups]
    return [*own.values(), *extra, *groups, *map(states, inner)]


def plain(make):
    """Train without a guard and without the steps of the fault."""
    torch.manual_seed(0)
    model = Small()
    optimizer = make(model)
    for step, batch in enumerate(make_data()):
        if step not in BROKEN:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def guarded(make):
    """Train with gradients that are NaN at five steps."""
    torch.manual_seed(0)
    model = Small()
    optimizer = make(model)
    guard = Guard(model, optimizer, policy=POLICY)
    for batch in guard.batches(make_data()):
        loss = loss_of(model, batch)
        loss.backward()
        times(math.nan, *BROKEN)(SimpleNamespace(model=model), guard.steps)
        guard.step(loss)
    return model, optimizer, guard


@pytest.mark.parametrize(
    "make",
    [
        lambda model: Contained(*parts(model)),
        OwnGroups,
        DuckTyped,
        Chained,
        OwnStateDict,
        StateDictOnly,
        lambda model: Lookahead(torch.optim.AdamW(model.parameters(), lr=3e-3)),
        lambda model: SharedCounter(model.parameters(), lr=3e-3),
        Referred,
        accelerated,
        own_muon,
        *(lambda model, place=place: Held(place, *parts(model)) for place in PLACES.values()),
        lambda model: Contained(StateDictOnly(model)),
        lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    ],
    ids=[
        *("subclass", "own groups", "duck-typed", "chained", "own state dict", "state dict only"),
        *("lookahead", "shared counter", "referred", "accelerate", "own muon", *PLACES, "inner state dict"),
        "adamw",
    ],
)
def test_rewound_training_equals_one_that_never_saw_the_fault(make):
    model, optimizer, guard = guarded(make)
    twin, wanted = plain(make)
    assert [alarm.action for alarm in guard.alarms] == ["skipped"] * 4 + ["rewound"]
    assert same(model.state_dict(), twin.state_dict())
    assert same(states(optimizer), states(wanted))


def train(model, make, after_step):
    guard = Guard(model, make(model))
    for batch in guard.batches(make_data()):
        loss = loss_of(model, batch)
        loss.backward()
        guard.step(loss)
        after_step(batch)


@pytest.mark.parametrize(
    "make, path",
    [
        (lambda model: SlowWeights(torch.optim.SGD(model.parameters(), lr=0.1)), "slow.0"),
        (lambda model: Momentum(model.parameters()), r"momentum\.\d+"),
    ],
    ids=["from the start on", "from the first step on"],
)
def test_optimizer_with_state_in_attributes_is_refused_at_first_update(make, path):
    torch.manual_seed(0)
    made = []
    with pytest.raises(ValueError, match=rf"^optimizer\.{path}: got 'a tensor that a rewind loses'; "):
        train(Small(), make, lambda _: made.append(1))
    assert len(made) == 1


def test_constants_that_were_filled_in_place_are_no_state():
    class Anchored(torch.optim.SGD):
        def __init__(self, model):
            super().__init__(model.parameters(), lr=0.1)
            self.anchors = [torch.empty_like(p).copy_(p.detach()) for p in model.parameters()]

    torch.manual_seed(0)
    made = []
    train(Small(), Anchored, lambda _: made.append(1))
    assert len(made) == len(make_data())


@pytest.mark.parametrize("steps", [0, 1])
def test_state_that_contains_itself_is_refused_in_one_line(steps):
    torch.manual_seed(0)
    model, made, endless = Small(), [], []
    endless.append(endless)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.head.bias]["endless"] = endless if steps == 0 else None

    def note(_):
        made.append(1)
        optimizer.state[model.head.bias]["endless"] = endless

    with pytest.raises(ValueError, match=r"^optimizer\.state.*: got a state with too many levels") as error:
        train(model, lambda _: optimizer, note)
    assert len(made) == steps
    assert "\n" not in str(error.value)

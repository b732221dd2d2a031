"""Inner optimizers are found in containers and wrappers, each once."""

import functools
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torchao.optim import AdamW4bit, AdamW8bit
from transformers import Adafactor

from stackwise.support.optimizer_state import (
    check_kept,
    optimizers_in,
    own_state_of,
    parameters_of,
    states_of,
)
from stackwise.support.tensor_tree import leaves
from tests.optimizer_kinds import PLACES, Contained, Holder, Momentum, SlowWeights, WithLayout


class Wrapper:
    """Passes on the groups and the state of another optimizer, as accelerate's wrapper does."""

    def __init__(self, inner):
        self.inner = inner

    def step(self):
        self.inner.step()

    @property
    def state(self):
        return self.inner.state

    @property
    def param_groups(self):
        return self.inner.param_groups


class Container(torch.optim.Optimizer):
    """Keeps its optimizers in an attribute, whose form the test chooses."""

    def __init__(self, place, *optimizers):
        super().__init__([p for each in optimizers for p in parameters_of(each)], {})
        self.place = place(*optimizers)

    def step(self):
        """Nothing to do."""


@pytest.fixture
def pair():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    first.step()
    second.step()
    return first, second


@pytest.mark.parametrize(
    "place",
    [
        lambda *each: list(each),
        lambda *each: each,
        lambda a, b: {"a": a, "b": [b]},
        lambda a, b: [Wrapper(a), Wrapper(b)],
        lambda *each: Container(lambda *inner: list(inner), *each),
        *PLACES.values(),
    ],
    ids=["list", "tuple", "dictionary", "wrappers", "container", *PLACES],
)
def test_inner_optimizers_are_found_in_attributes(pair, place):
    container = Container(place, *pair)
    found = optimizers_in(container)
    assert found[-1] is container
    assert all(any(each is one for one in found) for each in pair)
    values = [value for state in (each.state for each in pair) for value in state.values()]
    assert len(list(states_of(container))) == len(values) == 4


def test_parameters_of_inner_optimizers_follow_those_of_the_container(pair):
    first, second = pair
    first.second = second
    wanted = [p for each in pair for group in each.param_groups for p in group["params"]]
    assert list(map(id, parameters_of(first))) == list(map(id, wanted))


@pytest.mark.parametrize("holder", [SimpleNamespace, Holder])
def test_siblings_in_a_trainer_are_not_inner_optimizers(pair, holder):
    first, second = pair
    first.trainer = holder(optimizers=[first, second])
    assert optimizers_in(first) == [first]


def test_parts_that_refer_back_to_their_container_are_found(pair):
    container = Container(lambda *each: [Holder(inner=one) for one in each], *pair)
    for part in container.place:
        part.container = container
    assert {id(each) for each in optimizers_in(container)} == {id(each) for each in (container, *pair)}


def test_modules_hooks_and_library_objects_are_not_searched(pair):
    first, second = pair
    first.module, first.partial = nn.Module(), functools.partial(second.step)
    first.module.optimizer = second
    first.register_step_post_hook(Holder(optimizer=second, __call__=None).__init__)
    assert optimizers_in(first) == [first]


@pytest.mark.parametrize(
    "make, path",
    [
        (Momentum, "momentum."),
        (lambda p: Momentum(p, SimpleNamespace), "momentum."),
        (lambda p: SlowWeights(torch.optim.SGD(p, lr=0.1)), "slow.0"),
        (lambda p: Contained(Momentum(p)), "optimizers.0.momentum."),
        (lambda p: WithLayout(Momentum(p)), "optimizers.0.momentum."),
    ],
)
def test_tensors_in_attributes_are_refused_by_their_path(make, path):
    optimizer = stepped(make)
    saved = leaves(own_state_of(optimizer)).values()
    with pytest.raises(ValueError, match=rf"^mine\.{path}.*: got 'a tensor that a rewind loses'; ") as error:
        check_kept("mine", optimizer, saved, "a rewind")
    assert "\n" not in str(error.value)


class Unlike(torch.optim.SGD):
    """Counts in a tensor that is of no parameter's shape."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.counts = torch.zeros(77)

    def step(self, closure=None):
        self.counts += 1
        return super().step(closure)


class WithConstants(torch.optim.SGD):
    """Has tensors that never change: a table, as bitsandbytes has, and weights to decay to."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        anchors = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.constants = {"dynamic": torch.zeros(77), "anchors": anchors}


def test_tensors_that_do_not_change_are_no_state():
    optimizer = stepped(WithConstants)
    for _ in range(2):
        check_kept("mine", optimizer, [], "a rewind")


def test_a_tensor_that_is_replaced_is_state():
    optimizer = stepped(WithConstants)
    check_kept("mine", optimizer, [], "a rewind")
    kept = optimizer.constants["anchors"][0]  # so that its memory is not used again
    optimizer.constants["anchors"][0] = kept + 1
    with pytest.raises(ValueError, match=r"^mine\.constants\.anchors\.0: got 'a tensor that a rewind loses'"):
        check_kept("mine", optimizer, [], "a rewind")


@pytest.mark.parametrize("make", [Unlike, lambda p: Momentum(p, Holder)], ids=["shape", "object"])
def test_tensors_that_may_be_state_cause_one_warning(make):
    optimizer = stepped(make)
    with pytest.warns(RuntimeWarning, match=r"^mine\..*: got a tensor that a rewind loses; if it is state"):
        check_kept("mine", optimizer, [], "a rewind")
    check_kept("mine", optimizer, [], "a rewind")


class Flat(Momentum):
    """Saves copies of its momentum."""

    def state_dict(self):
        return {"momentum": [each.clone() for each in self.momentum.values()]}

    def load_state_dict(self, state):
        raise NotImplementedError


class Caches(torch.optim.SGD):
    """Has references to parameters, gradients, states and views of them, and single numbers."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        params = self.param_groups[0]["params"]
        self.flat, self.numbers = [p.data.view(-1) for p in params], {"scale": torch.ones(())}
        self.masters = {p: p for p in params}

    def step(self, closure=None):
        super().step()
        self.moments = [state["momentum_buffer"] for state in self.state.values()]
        self.gradients = [p.grad.view(-1) for p in self.masters]


class Unconsolidated(torch.optim.SGD):
    """Has no state dict before it is gathered, as `ZeroRedundancyOptimizer`."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.optim = torch.optim.AdamW(self.param_groups[0]["params"])
        self.ranks = dict.fromkeys(self.param_groups[0]["params"], 0)

    def state_dict(self):
        raise RuntimeError("not consolidated")


def accelerated(parameters):
    return Accelerator(cpu=True).prepare(torch.optim.AdamW(parameters))


NAMES = ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam")
NAMES += ("RAdam", "RMSprop", "Rprop", "SGD")
KINDS = {name: getattr(torch.optim, name) for name in NAMES}
KINDS |= {
    "transformers' Adafactor": Adafactor,
    "accelerate": accelerated,
    "lightning": lambda p: LightningOptimizer(torch.optim.AdamW(p)),
    "copies": Flat,
    "caches": Caches,
    "unconsolidated": Unconsolidated,
    "torchao 8 bit": AdamW8bit,
    "torchao 4 bit": AdamW4bit,
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_known_optimizers_are_neither_refused_nor_warned_of(make):
    optimizer = stepped(make)
    saved = leaves(list(map(own_state_of, optimizers_in(optimizer)))).values()
    check_kept("mine", optimizer, saved, "a rewind")


def stepped(make):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(64, 64)) for _ in range(2)]
    optimizer = make(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    step = getattr(optimizer, "optimizer", optimizer).step
    step(*([lambda: torch.ones(())] if isinstance(optimizer, torch.optim.LBFGS) else []))
    return optimizer

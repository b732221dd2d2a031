"""Optimizer state: optimizers in containers and wrappers, and tensors that a state dict would lose."""

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
from tests.optimizer_kinds import PLACES, Contained, Held, Holder, Momentum, SlowWeights, WithLayout

LOST = "got 'a tensor that a rewind loses'"


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


class OtherShape(torch.optim.SGD):
    """Counts in a tensor that has the shape of no parameter."""

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


class SavesCopies(Momentum):
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


OPTIMIZERS = ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam")
OPTIMIZERS += ("RAdam", "RMSprop", "Rprop", "SGD")
COMPLETE = {name: getattr(torch.optim, name) for name in OPTIMIZERS} | {
    "transformers' Adafactor": Adafactor,
    "accelerate": lambda p: Accelerator(cpu=True).prepare(torch.optim.AdamW(p)),
    "lightning": lambda p: LightningOptimizer(torch.optim.AdamW(p)),
    "copies": SavesCopies,
    "caches": Caches,
    "unconsolidated": Unconsolidated,
    "torchao 8 bit": AdamW8bit,
    "torchao 4 bit": AdamW4bit,
}
# Optimizers that lose tensors, each with the path of the tensor.
INCOMPLETE = {
    "mapping": (Momentum, "momentum."),
    "namespace": (lambda p: Momentum(p, SimpleNamespace), "momentum."),
    "duck-typed": (lambda p: SlowWeights(torch.optim.SGD(p, lr=0.1)), "slow.0"),
    "in a container": (lambda p: Contained(Momentum(p)), "optimizers.0.momentum."),
    "in a container with a state dict": (lambda p: WithLayout(Momentum(p)), "optimizers.0.momentum."),
}


@pytest.fixture
def pair():
    """Return two optimizers of two layers, after a step."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    first.step()
    second.step()
    return first, second


def stepped(make):
    """Return an optimizer of two matrices, after a step."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(64, 64)) for _ in range(2)]
    optimizer = make(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    step = getattr(optimizer, "optimizer", optimizer).step
    step(*([lambda: torch.ones(())] if isinstance(optimizer, torch.optim.LBFGS) else []))
    return optimizer


class TestInnerOptimizers:
    @pytest.mark.parametrize(
        "place",
        [
            lambda *each: list(each),
            lambda *each: each,
            lambda a, b: {"a": a, "b": [b]},
            lambda a, b: [Wrapper(a), Wrapper(b)],
            lambda *each: Held(lambda *inner: list(inner), *each),
            *PLACES.values(),
        ],
        ids=["list", "tuple", "dictionary", "wrappers", "container", *PLACES],
    )
    def test_are_found_in_attributes(self, pair, place):
        container = Held(place, *pair)
        found = optimizers_in(container)
        assert found[-1] is container
        assert all(any(each is one for one in found) for each in pair)
        values = [value for state in (each.state for each in pair) for value in state.values()]
        assert len(list(states_of(container))) == len(values) == 4

    def test_are_found_if_they_refer_to_their_container(self, pair):
        container = Held(lambda *each: [Holder(inner=one) for one in each], *pair)
        for part in container.place:
            part.container = container
        assert {id(each) for each in optimizers_in(container)} == {id(each) for each in (container, *pair)}

    @pytest.mark.parametrize("holder", [SimpleNamespace, Holder])
    def test_do_not_include_siblings_in_a_trainer(self, pair, holder):
        first, second = pair
        first.trainer = holder(optimizers=[first, second])
        assert optimizers_in(first) == [first]

    def test_are_not_searched_in_modules_hooks_and_library_objects(self, pair):
        first, second = pair
        first.module, first.partial = nn.Module(), functools.partial(second.step)
        first.module.optimizer = second
        first.register_step_post_hook(Holder(optimizer=second, __call__=None).__init__)
        assert optimizers_in(first) == [first]

    def test_have_their_parameters_after_those_of_the_container(self, pair):
        first, second = pair
        first.second = second
        expected = [p for each in pair for group in each.param_groups for p in group["params"]]
        assert list(map(id, parameters_of(first))) == list(map(id, expected))


class TestTensorsInAttributes:
    @pytest.mark.parametrize("make", COMPLETE.values(), ids=COMPLETE)
    def test_of_a_complete_optimizer_are_accepted(self, make):
        optimizer = stepped(make)
        saved = leaves(list(map(own_state_of, optimizers_in(optimizer)))).values()
        check_kept("mine", optimizer, saved, "a rewind")

    @pytest.mark.parametrize("make, path", INCOMPLETE.values(), ids=INCOMPLETE)
    def test_that_are_state_are_refused_by_their_path(self, make, path):
        optimizer = stepped(make)
        saved = leaves(own_state_of(optimizer)).values()
        with pytest.raises(ValueError, match=rf"^mine\.{path}.*: {LOST}; ") as error:
            check_kept("mine", optimizer, saved, "a rewind")
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("make", [OtherShape, lambda p: Momentum(p, Holder)], ids=["shape", "object"])
    def test_that_may_be_state_cause_one_warning(self, make):
        optimizer = stepped(make)
        with pytest.warns(
            RuntimeWarning, match=r"^mine\..*: got a tensor that a rewind loses; if it is state"
        ):
            check_kept("mine", optimizer, [], "a rewind")
        check_kept("mine", optimizer, [], "a rewind")

    def test_that_do_not_change_are_no_state(self):
        optimizer = stepped(WithConstants)
        for _ in range(2):
            check_kept("mine", optimizer, [], "a rewind")

    def test_that_are_replaced_are_state(self):
        optimizer = stepped(WithConstants)
        check_kept("mine", optimizer, [], "a rewind")
        kept = optimizer.constants["anchors"][0]  # so that its memory is not used again
        optimizer.constants["anchors"][0] = kept + 1
        with pytest.raises(ValueError, match=rf"^mine\.constants\.anchors\.0: {LOST}"):
            check_kept("mine", optimizer, [], "a rewind")

    def test_are_noted_only_if_no_update_was_made(self):
        optimizer = stepped(Momentum)
        check_kept("mine", optimizer, [], "a rewind", is_fresh=True)
        check_kept("mine", optimizer, [], "a rewind")

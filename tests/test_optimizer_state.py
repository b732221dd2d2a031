"""Inner optimizers are found in containers and wrappers, each once."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from stackwise.optimizer_state import optimizers_in, parameters_of, states_of


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
    ],
    ids=["list", "tuple", "dictionary", "wrappers", "container"],
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


def test_optimizers_in_other_objects_are_not_searched(pair):
    first, second = pair
    first.trainer = SimpleNamespace(optimizer=second)
    assert optimizers_in(first) == [first]

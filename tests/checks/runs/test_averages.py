"""Averages: copies of the weights in the attributes of a run."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from stackwise.checks.runs.averages import averages_of
from stackwise.subject.trainer_adapter import JoinedRun


class Run:
    """Run with a small model and some further attributes."""

    def __init__(self, **attributes):
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.__dict__.update(attributes)

    def step(self, batch):
        return 0.0


class Holder:
    """Plain object with attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Shadow(nn.Module):
    """Module whose copies of the weights are neither parameters nor buffers."""

    def __init__(self, model):
        super().__init__()
        self.first, self.second = (p.detach().clone() for p in list(model.parameters())[::2])


def weights(run):
    return [p.detach().clone() for p in run.model.parameters()]


def named(run):
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


@pytest.mark.parametrize(
    ("create", "path"),
    [
        (lambda run: copy.deepcopy(run.model), "average.0.weight"),
        (lambda run: AveragedModel(run.model), "average.module.0.weight"),
        (lambda run: Shadow(run.model), "average.first"),
        (weights, "average.0"),
        (lambda run: tuple(weights(run)), "average.0"),
        (named, "average.0.weight"),
        (lambda run: {"shadow": named(run)}, "average.shadow.0.weight"),
        (lambda run: Holder(shadow=weights(run)), "average.shadow.0"),
        (lambda run: [Holder(shadow=copy.deepcopy(run.model))], "average.0.shadow.0.weight"),
        (lambda run: SimpleNamespace(shadow=named(run)), "average.shadow.0.weight"),
    ],
    ids=[
        "module",
        "averaged-model",
        "plain-tensors",
        "list",
        "tuple",
        "dict",
        "nested-dict",
        "object",
        "list-of-objects",
        "namespace",
    ],
)
def test_copies_of_the_weights_are_found(create, path):
    run = Run()
    run.average = create(run)

    found = averages_of(run)

    assert torch.equal(found[path], run.model[0].weight)


@pytest.mark.parametrize(
    "create",
    [
        lambda run: run.model,
        lambda run: nn.Sequential(run.model),
        lambda run: list(run.model.parameters()),
        lambda run: copy.deepcopy(run.model[1].bias),
        lambda run: [copy.deepcopy(run.model[1].bias)],
        lambda run: nn.Linear(9, 9),
        lambda run: [torch.zeros(4, 3, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long)],
        lambda run: torch.optim.SGD([nn.Parameter(each) for each in weights(run)], lr=1.0),
        lambda run: Run,
        lambda run: "text",
        lambda run: Holder(a=Holder(b=Holder(c=weights(run)))),
    ],
    ids=[
        "the-model",
        "wrapper-of-the-model",
        "its-parameters",
        "one-tensor",
        "few-shapes",
        "other-shapes",
        "integers",
        "optimizer",
        "class",
        "text",
        "too-deep",
    ],
)
def test_other_attributes_are_no_averages(create):
    run = Run()
    run.other = create(run)

    assert averages_of(run) == {}


def test_half_of_the_shapes_are_enough():
    run = Run()

    run.average = weights(run)[:2]
    assert len(averages_of(run)) == 2

    run.average = weights(run)[:1]
    assert averages_of(run) == {}


def test_averages_are_copies():
    run = Run()
    run.average = copy.deepcopy(run.model)

    found = averages_of(run)
    before = found["average.0.weight"].clone()
    with torch.no_grad():
        run.average[0].weight.zero_()

    assert torch.equal(found["average.0.weight"], before)
    assert not any(tensor.requires_grad for tensor in found.values())


def test_averages_of_a_run_with_several_optimizers():
    run = Run()
    run.optimizer = [torch.optim.SGD(each.parameters(), lr=1.0) for each in run.model]
    run.average = weights(run)

    assert list(averages_of(JoinedRun(run))) == [f"average.{number}" for number in range(4)]


def test_two_averages_have_two_names():
    run = Run()
    run.fast, run.slow = weights(run), weights(run)

    assert {name.partition(".")[0] for name in averages_of(run)} == {"fast", "slow"}

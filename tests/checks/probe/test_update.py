"""Updates, observed from outside: one optimizer, and several that update together."""

import pytest
import torch
from torch import nn

from stackwise.checks.probe.update import distance, each_update, norm
from stackwise.subject.trainer_adapter import JoinedOptimizers


def optimizers(n=2):
    made = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(n)]
    for optimizer in made:
        optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    return made


@pytest.mark.parametrize(
    ("order", "events"),
    [
        ([0, 1], ["before", 0, 1, "after"]),
        ([0, 1, 0, 1], ["before", 0, 1, "after"] * 2),
        ([1, 0], ["before", 1, 0, "after"]),
        ([0, 0, 1], ["before", 0, "after", "before", 0, 1, "after"]),
        ([0], ["before", 0, "after"]),
        ([], []),
    ],
    ids=["both", "two-updates", "other-order", "one-steps-twice", "one-never-steps", "none"],
)
def test_optimizers_make_one_update_together(order, events):
    members, seen = optimizers(), []
    joined = JoinedOptimizers(members)

    with each_update(
        joined,
        lambda _: seen.append("before"),
        lambda _: seen.append("after"),
        lambda member: seen.append(members.index(member)),
    ):
        for index in order:
            members[index].step()

    assert seen == events


def test_nested_step_of_a_subclass_is_one_update():
    class Sub(torch.optim.SGD):
        def step(self):
            return super().step()

    optimizer, seen = Sub([nn.Parameter(torch.ones(1))], lr=0.1), []

    with each_update(optimizer, lambda _: seen.append("before"), lambda _: seen.append("after")):
        optimizer.step()

    assert seen == ["before", "after"]


def test_norm_and_distance_count_imaginary_parts():
    a, b = torch.tensor([3 + 4j]), torch.tensor([3 + 0j])
    assert norm([a]) == 5
    assert distance({"w": a}, {"w": b}) == pytest.approx(4 / 3)

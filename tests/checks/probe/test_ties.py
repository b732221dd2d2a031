"""Top-k among equals: seen where the choice is arbitrary, and nowhere else."""

import pytest
import torch

from stackwise.checks.probe.ties import chooses_among_equals

LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    "values, k, seen",
    [
        ([3.0, 2.0, 1.0], 2, False),
        ([3.0, 0.0, 0.0], 2, True),
        ([3.0, 3.0, 1.0], 2, False),
        ([3.0, 0.0, 0.0], 3, False),
        ([3.0, -torch.inf, -torch.inf], 2, False),
        ([3.0, LOWEST, LOWEST], 2, False),
        ([3, 1, 1], 2, True),
    ],
)
def test_choice_of_the_largest(values, k, seen):
    assert chooses_among_equals(lambda: torch.tensor(values).topk(k)) is seen
    assert chooses_among_equals(lambda: torch.tensor(values)[:, None].expand(-1, 2).topk(k, dim=0)) is seen


def test_nothing_is_chosen():
    assert not chooses_among_equals(lambda: torch.zeros(3).sort())

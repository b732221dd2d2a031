"""Top-k among equals: seen where the choice is arbitrary, and nowhere else."""

import pytest
import torch

from stackwise.checks.probe.ties import chooses_among_equals, selects_positions
from stackwise.checks.subject import Subject
from tests.zoo.gpt import GPT, spec_of

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


def test_model_of_one_length_selects_no_positions():
    class OneLength(GPT):
        def forward(self, input_ids, **options):
            assert input_ids.shape[1] == 16
            return super().forward(input_ids, **options)

    assert not selects_positions(Subject(spec_of(OneLength), torch.device("cpu")))

"""Copies of a template are equal to the model and share no tensor with it."""

import pytest
import torch
from torch import nn

from stackwise.checks.engine.template import Template


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.arange(3))
        self.last_output = torch.ones(2)  # neither a parameter nor a buffer

    def forward(self, ids):
        return self.head(self.embedding(ids)) * self.steps.sum() + self.last_output.sum()


class SharedMemory(Tied):
    def __init__(self):
        super().__init__()
        self.register_buffer("first_steps", self.steps[:2])


def hooked():
    model = Tied()
    factor = torch.ones(())
    model.register_forward_hook(lambda module, args, output: output * factor)
    return model


@pytest.mark.parametrize("make", [Tied, SharedMemory, hooked])
def test_copies_are_equal_and_independent(make):
    model = make()
    template = Template(model)
    copies = template.copy(), template.copy()
    ids = torch.tensor([[0, 3, 5]])
    expected = model(ids)
    assert all(torch.equal(each(ids), expected) for each in copies)
    copies[0].embedding.weight.data.zero_()
    copies[0].steps.zero_()
    copies[0].last_output.zero_()
    assert torch.equal(copies[1](ids), expected)
    assert torch.equal(model(ids), expected)


@pytest.mark.parametrize("make", [Tied, SharedMemory])
def test_tensors_are_shared_in_a_copy_as_in_the_model(make):
    copied = Template(make()).copy()
    assert copied.head.weight is copied.embedding.weight
    if make is SharedMemory:
        copied.steps[0] = 7
        assert copied.first_steps[0] == 7

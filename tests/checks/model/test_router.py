"""Router: a constant added to all selection biases does not change the output."""

import pytest
import torch
from torch import nn


class Router(nn.Module):
    """One of four scales, selected by sigmoid scores."""

    def __init__(self):
        super().__init__()
        self.embedding, self.router, self.head = nn.Embedding(31, 8), nn.Linear(8, 4), nn.Linear(8, 31)
        self.scales = nn.Parameter(torch.linspace(1.0, 2.0, 4))

    def forward(self, ids):
        x = self.embedding(ids)
        scores = self.router(x).sigmoid()
        weights, chosen = scores.max(dim=-1, keepdim=True)
        return self.head(x * self.scales[chosen] * weights)


class LearnedBias(Router):
    """The bias is learned, and part of the weights."""

    def __init__(self):
        super().__init__()
        self.expert_bias = nn.Parameter(torch.zeros(4))

    def forward(self, ids):
        x = self.embedding(ids)
        weights, chosen = (self.router(x) + self.expert_bias).sigmoid().max(dim=-1, keepdim=True)
        return self.head(x * self.scales[chosen] * weights)


@pytest.mark.parametrize("build", [Router, LearnedBias])
def test_bias_in_the_weights_of_experts_is_no_selection_bias(subjects, build):
    assert subjects.ask(build, "selection_bias").status == "not applicable"

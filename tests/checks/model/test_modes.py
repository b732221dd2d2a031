"""Modes: a call in eval mode must not change later calls in train mode."""

import pytest
import torch
from torch import nn

from tests.zoo.gpt import GPT, spec_of


class RateLost(GPT):
    """The first call in eval mode sets the dropout rate to 0."""

    def drop(self, x):
        if not self.training:
            self.dropout = 0.0
        return super().drop(x)


class StatisticsOfEvaluation(nn.Module):
    """A running mean that calls in eval mode update as well."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, ids):
        x = self.tokens(ids)
        if not self.training:
            self.mean += x.mean((0, 1))
        return self.head(x - self.mean)


class NoTrainMode(GPT):
    def embed(self, input_ids):
        if self.training:
            raise ValueError("train mode needs labels")
        return super().embed(input_ids)


class CountsCalls(GPT):
    """The scale of the embedding depends on the number of calls."""

    calls = 0

    def embed(self, input_ids):
        self.calls += 1
        return super().embed(input_ids) / self.calls


@pytest.mark.parametrize(
    ("build", "status"),
    [
        (GPT, "passed"),
        (RateLost, "failed"),
        (NoTrainMode, "not applicable"),
        (CountsCalls, "not applicable"),
    ],
)
def test_train_mode_after_a_call_in_eval_mode(subjects, build, status):
    assert subjects.ask(spec_of(build), "mode_switch").status == status


def test_buffers_that_only_eval_mode_updates_are_restored(subjects):
    """`eval_buffers` and `side_effects` report them."""
    assert subjects.ask(StatisticsOfEvaluation, "mode_switch").status == "passed"

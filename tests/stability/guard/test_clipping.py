"""Gradients that come clipped are told of; those that are alike for another reason are not."""

import math

import pytest
import torch
from torch import nn

from stackwise.stability.guard import Guard
from stackwise.stability.guard.detector import ClippingDetector


def told(clipped, numbers):
    """At which of these steps."""
    return [i for i, (norm, norms) in enumerate(numbers) if clipped.detects(norm, norms)]


def test_a_norm_that_stays_while_its_parts_do_not():
    parts = [{"a": math.cos(i), "b": math.sin(i)} for i in range(40)]
    alike = [(1.0 + 1e-6 * (i % 2), each) for i, each in enumerate(parts)]
    assert told(ClippingDetector(), alike) == [8]
    seldom = [(2.0 if i % 8 == 0 else 1.0, each) for i, each in enumerate(parts)]
    assert told(ClippingDetector(), seldom) == []


@pytest.mark.parametrize(
    "norm, norms",
    [
        (lambda i: 1.0, lambda i: {"a": 0.6, "b": 0.8}),  # a gradient that is constant
        (lambda i: 1.0 + 1e-6 * i, lambda i: {"a": 0.6 + 1e-6 * i, "b": 0.8}),  # or nearly so
        (lambda i: 0.0, lambda i: {"a": 0.0, "b": 0.0}),
        (lambda i: 1.0 + 1e-3 * (i % 3), lambda i: {"a": math.cos(i), "b": math.sin(i)}),
    ],
)
def test_what_is_no_clipping(norm, norms):
    assert told(ClippingDetector(), [(norm(i), norms(i)) for i in range(40)]) == []


@pytest.mark.parametrize("lag", [0, 2])
def test_a_guard_warns_of_a_loop_that_clips_by_itself(lag):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), lag=lag)

    def train():
        for batch in guard.batches([torch.randn(16, 8) for _ in range(30)]):
            loss = (model(batch) - batch.sum(-1, keepdim=True)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            guard.step(loss)

    with pytest.warns(RuntimeWarning, match="got a norm of 0.1 at each of.*max_grad_norm") as warned:
        train()
    assert len(warned) == 1

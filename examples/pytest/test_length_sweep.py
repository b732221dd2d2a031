"""One model at many sequence lengths: finite, stable in training, and its logits of one size?

Run it: `pytest examples/pytest/test_length_sweep.py -rx`.
"""

import pytest
import torch
from torch import nn

from stackwise import ModelSpec


class Mixer(nn.Module):
    """Each position reads the mean of all up to it; or, which is wrong, their sum."""

    def __init__(self, by="mean"):
        super().__init__()
        self.embedding, self.head, self.by = nn.Embedding(32, 16), nn.Linear(16, 32), by

    def forward(self, ids):
        x = self.embedding(ids).cumsum(1)
        if self.by == "mean":
            x = x / torch.arange(1, ids.shape[1] + 1)[:, None]
        return self.head(x)


def sound():
    return Mixer()


def growing():
    return Mixer("sum")


MODELS = [
    sound,
    pytest.param(growing, marks=pytest.mark.xfail(strict=True, reason="its logits grow with the length")),
]


@pytest.mark.seq_lengths(8, 64, 512)
@pytest.mark.parametrize("model", MODELS)
def test_lengths_beside_each_other(length_sweep, model):
    sweep = length_sweep(ModelSpec.of(model, causal=True), steps=8)
    assert sweep.problems == []


@pytest.mark.seq_lengths(8, 64, 512)
def test_training_at_each_length(stability_run):
    assert stability_run(ModelSpec.of(sound, causal=True), steps=6).verdict == "stable"

"""Norms: a wrong power, wrong gains and a bias are found."""

import copy

import pytest
import torch
from torch import nn

from stackwise.subject.spec import ModelSpec


class PlusOneNorm(nn.Module):
    """A norm whose gain is 1 + weight, with the weight at 0: sound."""

    def __init__(self, start=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((16,), start))

    def forward(self, x):
        return x * x.square().mean(dim=-1, keepdim=True).add(1e-6).rsqrt() * (1 + self.weight)


class Gains(nn.Module):
    """Token model with one norm."""

    def __init__(self, start, norm=None):
        super().__init__()
        self.embedding, self.norm, self.head = (
            nn.Embedding(50, 16),
            norm or nn.LayerNorm(16),
            nn.Linear(16, 50),
        )
        start(self.norm)

    def forward(self, input_ids):
        return self.head(self.norm(self.embedding(input_ids)))


@pytest.mark.parametrize(
    "start, status",
    [
        (lambda norm: None, "passed"),
        (lambda norm: nn.init.normal_(norm.weight, 1.0, 0.02), "passed"),
        (lambda norm: nn.init.normal_(norm.weight, 0.0, 0.02), "failed"),
        (lambda norm: nn.init.constant_(norm.weight, 0.02), "warned"),
        (lambda norm: nn.init.constant_(norm.weight, 10.0), "warned"),
        (lambda norm: nn.init.constant_(norm.bias, 0.5), "warned"),
    ],
)
def test_norm_gains(subjects, start, status):
    result = subjects.ask(lambda: Gains(start), "norm_gains")
    assert result.status == status
    if status != "passed":
        assert "norm" in (result.where, result.meaning.split()[0])


def test_what_a_norm_does_counts_not_its_weight(subjects):
    assert subjects.ask(lambda: Gains(lambda norm: None, PlusOneNorm()), "norm_gains").status == "passed"
    assert subjects.ask(lambda: Gains(lambda norm: None, PlusOneNorm(-0.99)), "norm_gains").status == "warned"


@pytest.mark.parametrize("name", ["gru", "conv"])
def test_models_without_norms(subjects, name):
    assert subjects.ask(getattr(subjects, name), "norm_gains").status == "not applicable"


def test_trained_weights_are_not_asked(subjects):
    spec = ModelSpec.of(lambda: Gains(lambda norm: None), trained=True)
    assert subjects.ask(spec, "norm_gains").status == "not applicable"


class PowerNorm(nn.Module):
    """The input times a power of its RMS. The power -1 is that of a norm."""

    def __init__(self, power):
        super().__init__()
        self.power, self.weight = power, nn.Parameter(torch.ones(16))

    def forward(self, x):
        return self.weight * x * x.square().mean(dim=-1, keepdim=True).sqrt() ** self.power


class Saturated(PowerNorm):
    pass


class SaturatingNorm(PowerNorm):
    def forward(self, x):
        return self.weight * x.tanh()


@pytest.mark.parametrize(
    "norm, status",
    [
        (nn.LayerNorm(16), "passed"),
        (nn.RMSNorm(16, elementwise_affine=False), "passed"),
        (PlusOneNorm(), "passed"),
        (PowerNorm(-1), "passed"),
        (PowerNorm(1), "failed"),
        (PowerNorm(-2), "failed"),
        (nn.Sequential(PowerNorm(-2), SaturatingNorm(0)), "failed"),
        (SaturatingNorm(0), "warned"),
        (PowerNorm(0), "warned"),
        (Saturated(1), "not applicable"),
        (nn.Identity(), "not applicable"),
    ],
    ids=repr,
)
def test_norm_removes_the_size_of_its_input(subjects, norm, status):
    result = subjects.ask(lambda: Gains(lambda norm: None, copy.deepcopy(norm)), "norm_scale")
    assert result.status == status
    assert result.where.startswith("norm") == (status in ("failed", "warned"))

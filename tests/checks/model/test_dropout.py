"""Dropout: a missing scale, and draws that all rows share, are found."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.subject.spec import ModelSpec


class DropPath(nn.Module):
    """Drops the branch of a row. The mask has the size of the batch in dimension `rows`."""

    def __init__(self, p=0.3, rows=0, scales=True):
        super().__init__()
        self.p, self.rows, self.scales = p, rows, scales

    def forward(self, x):
        if not self.training:
            return x
        shape = [1] * x.ndim
        if self.rows is not None:
            shape[self.rows] = x.shape[self.rows]
        keep = (torch.rand(shape) >= self.p).to(x)
        return x * keep / (1 - self.p if self.scales else 1)


class Paths(nn.Module):
    """Two residual layers, each with a dropped path."""

    def __init__(self, drop):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.drop = drop

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + self.drop(layer(x).relu())
        return self.head(x)


class PositionsFirst(nn.Module):
    """Gives (T, B, C) to a module that expects (B, T, C)."""

    def __init__(self):
        super().__init__()
        self.drop = DropPath()

    def forward(self, x):
        return self.drop(x.transpose(0, 1)).transpose(0, 1)


class RunningMean(nn.Module):
    """Has a state that train mode updates, and no random draws."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(dim=(0, 1)), 0.1)
        return x - self.mean


@pytest.mark.parametrize(
    "drop, mean, rows",
    [
        (DropPath(), "passed", "passed"),
        (DropPath(scales=False), "warned", "passed"),
        (PositionsFirst(), "passed", "failed"),
        (DropPath(rows=1), "passed", "warned"),
        (DropPath(rows=None), "passed", "warned"),
        (RunningMean(), "not applicable", "warned"),
        (DropPath(p=0.0), "not applicable", "not applicable"),
        (nn.Dropout(0.3), "not applicable", "passed"),
        (nn.Identity(), "not applicable", "not applicable"),
    ],
    ids=[
        *("sound", "not scaled", "positions first", "of positions", "of the batch", "running mean"),
        *("never", "of torch", "none"),
    ],
)
def test_draws_of_train_mode(subjects, drop, mean, rows):
    spec = ModelSpec.of(lambda: Paths(drop))
    assert subjects.ask(spec, "dropout_mean").status == mean
    result = subjects.ask(spec, "dropout_rows")
    assert (result.status, result.where) == (rows, "drop.drop" if rows == "failed" else "")


def test_sums_of_half_precision_do_not_overflow(subjects):
    def build():
        model = Paths(DropPath()).half()
        model.embedding.weight.data *= 100
        return model

    assert subjects.ask(build, "dropout_mean").status == "passed"


class Branch(nn.Module):
    """Linear layer with a dropout module that `apply(branch, y)` may use."""

    def __init__(self, apply, rate=0.1):
        super().__init__()
        self.linear, self.dropout, self.rate = nn.Linear(16, 16), nn.Dropout(rate), rate
        self.apply_dropout = apply

    def forward(self, x):
        return self.apply_dropout(self, self.linear(x))


def _attention(branch, y):
    return F.scaled_dot_product_attention(y, y, y, dropout_p=branch.rate if branch.training else 0.0)


@pytest.mark.parametrize(
    ("apply", "rate", "status"),
    [
        (lambda branch, y: branch.dropout(y), 0.1, "passed"),
        (lambda branch, y: F.dropout(y, branch.dropout.p, branch.training), 0.1, "passed"),
        (_attention, 0.1, "passed"),
        (lambda branch, y: y, 0.1, "failed"),
        (lambda branch, y: F.dropout(y, 0.3, branch.training), 0.1, "failed"),
        (lambda branch, y: y, 0.0, "not applicable"),
    ],
)
def test_dropout_applied_in_the_module_that_contains_it(subjects, apply, rate, status):
    result = subjects.ask(lambda: Paths(Branch(apply, rate)), "dropout_applied")
    assert result.status == status
    if status == "failed":
        assert (result.value, result.where) == (1.0, "drop.dropout")


def test_dropout_of_a_module_that_is_not_called_is_no_finding(subjects):
    class Unused(Paths):
        def __init__(self):
            super().__init__(nn.Identity())
            self.pooler = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1))

    assert subjects.ask(Unused, "dropout_applied").status == "passed"

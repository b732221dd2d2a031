"""Dropout: a missing scale, and draws that all rows share, are found."""

import pytest
import torch
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
            x = x + self.drop(layer(x).tanh())
        return self.head(x)


@pytest.mark.parametrize(
    "drop, mean, rows",
    [
        (DropPath(), "passed", "passed"),
        (DropPath(scales=False), "warned", "passed"),
        (DropPath(rows=1), "passed", "failed"),
        (DropPath(rows=None), "passed", "warned"),
        (DropPath(p=0.0), "not applicable", "not applicable"),
        (nn.Dropout(0.3), "not applicable", "passed"),
        (nn.Identity(), "not applicable", "not applicable"),
    ],
    ids=["sound", "not scaled", "of positions", "of the batch", "never", "of torch", "none"],
)
def test_draws_of_train_mode(subjects, drop, mean, rows):
    spec = ModelSpec.of(lambda: Paths(drop))
    assert subjects.ask(spec, "dropout_mean").status == mean
    result = subjects.ask(spec, "dropout_rows")
    assert (result.status, result.where) == (rows, "drop" if rows == "failed" else "")

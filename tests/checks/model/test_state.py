"""State: a call in eval mode must not change the buffers of a model."""

import pytest
import torch
from torch import nn


class Counting(nn.Module):
    """Counts the tokens of each id in a buffer."""

    persistent = True

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 8)
        self.register_buffer("seen", torch.zeros(31), persistent=self.persistent)

    def forward(self, ids):
        self.count(ids)
        return self.embedding(ids)

    def count(self, ids):
        self.seen += torch.bincount(ids.flatten(), minlength=31)


class NotSaved(Counting):
    persistent = False


class InTraining(Counting):
    def count(self, ids):
        if self.training:
            super().count(ids)


class Cached(Counting):
    """The buffer contains the last inputs, as a cache of keys and values does."""

    def count(self, ids):
        self.seen[: ids.shape[1]] = ids[0]


@pytest.mark.parametrize(
    "build, status",
    [(Counting, "failed"), (NotSaved, "failed"), (InTraining, "passed"), (Cached, "passed")],
)
def test_buffers_stay_the_same_in_eval_mode(subjects, build, status):
    assert subjects.ask(build, "eval_buffers").status == status


@pytest.mark.parametrize("name", ["rack", "llama", "gru"])
def test_healthy_model_passes(subjects, name):
    assert subjects.ask(getattr(subjects, name), "eval_buffers").status == "passed"


def test_buffers_of_any_dtype_are_compared(subjects):
    class Narrow(Counting):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor(float("nan")).to(torch.float8_e4m3fn))
            self.register_buffer("empty", torch.zeros(0))

        def count(self, ids):
            pass

    assert subjects.ask(Narrow, "eval_buffers").status == "passed"

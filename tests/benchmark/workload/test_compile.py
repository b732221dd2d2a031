"""Workloads that are compiled."""

from functools import partial

import pytest
import torch
from torch import nn

from stackwise.benchmark import model_workload
from stackwise.subject.spec import ModelSpec


def tables():
    return nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))


class TestCompile:
    @pytest.fixture(autouse=True)
    def _eager(self, monkeypatch):
        """What the compiler hands on is run as it is: how it is captured is what these tests are about."""
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize("mode", ["forward", "train", "prefill", "decode"])
    def test_modes(self, subjects, mode):
        # The compiler looks classes up by their module, which those of `subjects` do not have.
        spec = ModelSpec.of(subjects.rack if mode in ("prefill", "decode") else tables)
        made = model_workload(spec, mode, batch_size=2, seq_len=4, compile=True)
        made.call()
        assert made.execution()["compile"] == "1 graph"

    def test_no_shape_of_a_sweep_is_left_out(self):
        """The compiler keeps 8 graphs of one code object, and runs more shapes as they are, untold."""
        spec = ModelSpec.of(tables)
        for seq_len in range(4, 14):
            made = model_workload(spec, "forward", batch_size=1, seq_len=seq_len, compile=True)
            assert made.execution()["compile"] == "1 graph", seq_len

    def test_a_compiler_that_is_off_is_told(self):
        with torch._dynamo.config.patch(disable=True):
            made = model_workload(ModelSpec.of(tables), "forward", batch_size=1, seq_len=4, compile=True)
        assert made.execution()["compile"] == "asked for, but no graph was captured"

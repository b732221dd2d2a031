"""Two ranks: what sets them apart from one process is found, and sound ones are left alone."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stackwise.checks import check_trainer
from stackwise.checks.check import select_checks
from stackwise.checks.probe.another_process import Recipe
from stackwise.checks.probe.ranks import _part, _plain, assembled
from tests.zoo.distributed import ranked
from tests.zoo.gpt import GPT
from tests.zoo.loop import Loop, loop, loop_spec_of

FAMILY = [c.name for c in select_checks(suite="full", asks="trainer") if c.family == "distributed"]


def answers(spec):
    return {result.check: result for result in check_trainer(spec, checks=FAMILY)}


class CountingGPT(GPT):
    """With dropout, and with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, *arguments, **keywords):
        self.seen += 1
        return super().forward(*arguments, **keywords)


class Counting(Loop):
    def create_model(self):
        return CountingGPT()


class Wrapped(Counting):
    """As torch does it."""

    def create_model(self):
        return DistributedDataParallel(super().create_model())

    def clip(self):
        self.grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)


class Past(Wrapped):
    """The wrapper is there, and the loss is taken of what it wraps."""

    def loss(self, batch):
        return self.model.module(**batch).loss


def wrapped(build):
    return replace(loop_spec_of(Counting), distributed=build)


@pytest.mark.slow
def test_wrapper_of_torch():
    results = answers(wrapped(Wrapped))
    assert {name: r.status for name, r in results.items()} == dict.fromkeys(FAMILY, "passed")
    assert results["gradients_equal_dense"].value < 1e-5
    assert results["norm_equals_dense"].value < 1e-5


@pytest.mark.slow
def test_wrapper_of_torch_bypassed():
    results = answers(wrapped(Past))
    assert results["collectives_agree"].status == "passed", results
    assert results["replicas_agree"].status == results["gradients_equal_dense"].status == "failed", results
    assert "past its wrapper" in results["replicas_agree"].advice


def raising():
    raise ArithmeticError("no number")


def test_a_rank_that_raises():
    results = answers(ranked(raising))
    assert results.pop("collectives_agree").status == "failed"
    assert {r.meaning for r in results.values()} == {"needs ranks that finish: see collectives_agree"}


def test_what_it_needs():
    assert {r.meaning for r in answers(loop()).values()} == {"needs TrainerSpec.distributed"}
    local = ranked(type("Local", (Loop,), {}))
    assert Recipe.of(local, "distributed") is None
    assert all("can be pickled" in r.meaning for r in answers(local).values())


def test_parts_of_a_batch():
    batch = {"input_ids": torch.arange(8)[:, None], "more": [torch.arange(8)], "name": "x"}
    part = _part(batch, 1, 2)
    assert part["input_ids"].flatten().tolist() == part["more"][0].tolist() == [4, 5, 6, 7]
    assert part["name"] == "x"


def test_assembled():
    whole = torch.arange(12.0).view(4, 3)
    assert torch.equal(assembled([whole, whole + 1], whole.shape), whole)
    assert torch.equal(assembled([whole[:1], whole[1:]], whole.shape), whole)
    assert torch.equal(assembled([whole[:, :2], whole[:, 2:]], whole.shape), whole)
    assert assembled([whole[:1], whole[:1]], whole.shape) is None


def test_names_without_wrappers():
    assert _plain("module._orig_mod.layers.0.weight") == "layers.0.weight"

"""What a model tells of its work."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from stackwise.benchmark import call_once, model_workload
from stackwise.benchmark.workload import callable_workload
from stackwise.benchmark.workload.model_facts import held_bytes
from stackwise.model import create_simple_rack
from stackwise.subject.spec import ModelSpec
from tests.optimizer_kinds import Contained


class TestExecution:
    """A measurement says how the work was done, as far as the model does."""

    @staticmethod
    def told(model, mode="forward"):
        spec = ModelSpec.of(lambda: model)
        return call_once(model_workload(spec, mode, batch_size=1, seq_len=4)).execution

    @pytest.mark.parametrize("mode", ["forward", "train"])
    def test_of_a_rack(self, mode):
        rack = create_simple_rack(1, 1, 16, 24, 2, 11, softcap=30.0)
        assert self.told(rack, mode) == {"attention": "sliced"}

    def test_of_a_transformers_model(self):
        config = LlamaConfig(
            vocab_size=11,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            attn_implementation="eager",
        )
        assert self.told(LlamaForCausalLM(config)) == {"attention": "eager"}

    def test_of_a_model_that_says_nothing(self):
        assert self.told(nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))) == {}


def test_bytes_that_are_held(subjects):
    """A weight that is packed has fewer bytes than its shape and dtype say: a floor leaves it out."""

    class Packed(torch.Tensor):
        pass

    def packed():
        model = subjects.gru()
        model.head.weight = nn.Parameter(model.head.weight.detach().as_subclass(Packed))
        return model

    spec = ModelSpec.of(subjects.gru)
    plain, fewer = (
        model_workload(each, "forward", batch_size=1, seq_len=4).held_bytes()
        for each in (spec, replace(spec, build=packed))
    )
    assert plain == sum(p.nbytes for p in subjects.gru().parameters())
    assert fewer == plain - subjects.gru().head.weight.nbytes
    assert callable_workload(list).held_bytes() == 0


def test_states_within_a_container_are_held(subjects):
    model = subjects.gru()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    inner.step()
    assert held_bytes(model, Contained(inner)) == held_bytes(model, inner)
    assert held_bytes(model, inner) == held_bytes(model, None) + 2 * sum(p.nbytes for p in model.parameters())

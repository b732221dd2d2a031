"""What a workload does to its model, and the sizes that it refuses."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from stackwise.benchmark import Workload, call_once, model_workload
from stackwise.benchmark.workload import MODES, check_shape
from stackwise.model import create_simple_rack
from stackwise.spec import ModelSpec


@pytest.fixture
def watched(subjects):
    """A spec, the models that it builds, and what each forward pass saw."""
    built, seen = [], []

    class Watched(subjects.GRULM):
        def __init__(self):
            super().__init__()
            built.append(self)

        def forward(self, ids):
            seen.append((tuple(ids.shape), self.training, torch.is_grad_enabled()))
            return super().forward(ids)

    return ModelSpec(Watched, "watched", "tokens", 50, causal=True, max_length=32), built, seen


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    return [name for name in a if torch.equal(a[name], b[name])]


def test_forward_changes_nothing(watched):
    spec, built, seen = watched
    workload = model_workload(spec, "forward", batch_size=3, seq_len=7)
    [model] = built
    before = weights(model)
    assert seen == []
    for _ in range(3):
        workload.call()
    assert seen == [((3, 7), False, False)] * 3
    assert same(before, weights(model)) == list(before)
    assert all(p.grad is None for p in model.parameters())


def test_train_changes_every_weight(watched):
    spec, built, seen = watched
    workload = model_workload(spec, "train", batch_size=3, seq_len=7)
    [model] = built
    states = [weights(model)]
    for _ in range(3):
        workload.call()
        states.append(weights(model))
    assert seen == [((3, 7), True, True)] * 3
    # Of the embedding only the rows of the batch's tokens move, which makes it change all the same.
    for before, after in pairwise(states):
        assert same(before, after) == []
    # Gradients of one step must not be added to those of the next.
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_train_is_the_step_that_the_spec_describes(subjects):
    kept = []

    def optimizer(parameters):
        kept[:] = parameters
        return torch.optim.SGD(kept, lr=0.5)

    spec = ModelSpec.of(subjects.gru, optimizer=optimizer)
    workload = model_workload(spec, "train", batch_size=2, seq_len=5, seed=3)
    model, ids = spec.create(seed=3), spec.batch(2, 5, seed=3)
    for _ in range(2):
        workload.call()
        gradients = torch.autograd.grad(spec.loss_of(model, ids), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
    for ours, expected in zip(kept, model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


def test_frozen_weights_are_not_trained(subjects):
    def factory():
        model = subjects.gru()
        model.embedding.requires_grad_(False)
        return model

    kept = []

    def optimizer(parameters):
        kept[:] = parameters
        return torch.optim.SGD(kept, lr=0.5)

    model_workload(ModelSpec.of(factory, optimizer=optimizer), "train", batch_size=2, seq_len=5).call()
    assert len(kept) == len(list(subjects.gru().parameters())) - 1


@pytest.mark.parametrize("name", ["rack", "llama", "x_decoder", "encoder"])
@pytest.mark.parametrize("mode", MODES)
def test_other_models(subjects, name, mode):
    workload = model_workload(ModelSpec.of(getattr(subjects, name)), mode, batch_size=2, seq_len=6)
    workload.call()
    workload.call()
    assert workload.name == f"{name} {mode}"
    assert workload.tokens == 12
    assert workload.device == torch.device("cpu")


def test_weights_and_inputs_come_from_the_seed(subjects):
    outputs = []
    spec = ModelSpec.of(
        subjects.gru,
        forward=lambda model, ids: outputs.append(model(ids)) or outputs[-1],
        width=50,
        inputs="tokens",
    )
    outputs.clear()
    for seed in (1, 1, 2):
        model_workload(spec, "forward", batch_size=2, seq_len=5, seed=seed).call()
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode):
    check_shape(mode=mode)


@pytest.mark.parametrize("mode", ["Forward", "training", "", None])
def test_other_modes(watched, mode):
    with pytest.raises(ValueError, match=r"mode: got .*; allowed: 'forward', 'train'") as raised:
        model_workload(watched[0], mode, batch_size=1, seq_len=1)
    assert repr(mode) in str(raised.value)
    assert not watched[1], "it is refused before anything is built"


@pytest.mark.parametrize("key", ["batch_size", "seq_len"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "4", None, True])
def test_sizes(watched, key, value):
    sizes = {"batch_size": 2, "seq_len": 3} | {key: value}
    with pytest.raises(ValueError, match=f"{key}: got {value!r}; allowed: an integer >= 1"):
        model_workload(watched[0], "forward", **sizes)
    with pytest.raises(ValueError, match=f"{key}: got"):
        check_shape(**sizes)
    assert not watched[1]


def test_beyond_the_model(watched):
    model_workload(watched[0], "forward", batch_size=1, seq_len=32)
    with pytest.raises(ValueError, match="seq_len: got 33; watched takes at most 32 positions"):
        model_workload(watched[0], "forward", batch_size=1, seq_len=33)


def test_a_workload_of_ones_own():
    workload = Workload("mine", list, torch.device("cpu"))
    assert workload.tokens == 0


class TestExecution:
    """A measurement says how the work was done, as far as the model does."""

    @staticmethod
    def told(model, mode="forward"):
        spec = ModelSpec.of(lambda: model)
        return call_once(model_workload(spec, mode, batch_size=1, seq_len=4)).execution

    @pytest.mark.parametrize("mode", ["forward", "train"])
    def test_of_a_rack(self, mode):
        rack = create_simple_rack(1, 1, 16, 24, 2, 11, sliding_window=2)
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

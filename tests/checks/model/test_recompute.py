"""Recomputed activations: other gradients are found, whether the model offers recomputation or is wrapped."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture(scope="module")
def models(subjects):
    class Recomputing(subjects.TinyLM):
        recomputes = False
        preserves = True

        def gradient_checkpointing_enable(self):
            self.recomputes = True

        def mix(self, x):
            if self.recomputes and self.training:
                return checkpoint(self.part, x, use_reentrant=False, preserve_rng_state=self.preserves)
            return self.part(x)

        def part(self, x):
            return F.dropout(F.gelu(x), 0.2, self.training)

    class OtherDropout(Recomputing):
        preserves = False

    class Counter(Recomputing):
        calls = 0

        def part(self, x):
            self.calls += 1
            return F.gelu(x * self.calls)

    class Statistics(Recomputing):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def part(self, x):
            if self.training:
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
            return F.gelu(x)

    class Idle(Recomputing):
        def gradient_checkpointing_enable(self):
            pass

    class Refuses(Recomputing):
        def gradient_checkpointing_enable(self):
            raise ValueError("does not support gradient checkpointing")

    return {name: value for name, value in locals().items() if isinstance(value, type)}


def gradients(factory, recomputes, passes=2):
    torch.manual_seed(0)
    model = factory().train()
    if recomputes:
        model.gradient_checkpointing_enable()
    torch.manual_seed(1)
    for _ in range(passes):
        model.zero_grad()
        model(torch.arange(16)[None]).square().mean().backward()
    return model.tokens.weight.grad


@pytest.mark.parametrize("name", ["OtherDropout", "Counter"])
def test_other_gradients(subjects, models, name):
    assert not torch.allclose(gradients(models[name], False, 1), gradients(models[name], True, 1), rtol=1e-2)
    result = subjects.ask(models[name], "recompute_gradients")
    assert result.status == "failed"
    assert result.value > result.limit
    assert ", pass " in result.where
    assert "its own switch" in result.meaning


def test_sound(subjects, models):
    assert torch.equal(gradients(models["Recomputing"], False), gradients(models["Recomputing"], True))
    result = subjects.ask(models["Recomputing"], "recompute_gradients")
    assert result.status == "passed", result
    assert 0 < result.limit <= 1e-4
    assert result.value <= result.limit


def test_buffers_updated_twice(subjects, models):
    result = subjects.ask(models["Statistics"], "recompute_gradients")
    assert (result.status, result.where) == ("warned", "mean")


@pytest.mark.parametrize("name", ["Idle", "Refuses"])
def test_nothing_to_ask(subjects, models, name):
    result = subjects.ask(models[name], "recompute_gradients")
    assert result.status == "not applicable"
    assert "gradient_checkpointing_enable" in result.meaning


@pytest.mark.parametrize("name", ["rack", "dropout_rack", "encoder"])
def test_layers_are_wrapped(subjects, name):
    result = subjects.ask(getattr(subjects, name), "recompute_gradients")
    assert result.status == "passed"
    assert "wrapping its layers" in result.meaning


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_transformers(subjects, name):
    result = subjects.ask(getattr(subjects, name), "recompute_gradients")
    assert result.status == "passed"
    assert "its own switch" in result.meaning


class Layer(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.linear, self.seen = nn.Linear(8, 8), seen

    def forward(self, x):
        self.seen.append(None)
        return x + F.gelu(self.linear(x * len(self.seen)))


class Layers(nn.Module):
    """Layers that count all calls among them: unusual, and wrong only for whoever recomputes."""

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        seen = []
        self.layers = nn.ModuleList(Layer(seen) for _ in range(3))

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_model_that_offers_nothing_is_only_warned(subjects):
    result = subjects.ask(Layers, "recompute_gradients")
    assert result.status == "warned"
    assert result.value > result.limit
    assert result.where.startswith("layers.")


class RecomputedLayer(nn.Linear):
    """Layer with a running mean, which recomputes its activations."""

    keeps = False

    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False)

    def part(self, x):
        is_first = torch._C._current_graph_task_id() == -1
        if self.training and (is_first or not self.keeps):
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
        return x + F.gelu(super().forward(x))


class KeepingLayer(RecomputedLayer):
    keeps = True


@pytest.mark.parametrize("layer, status", [(RecomputedLayer, "failed"), (KeepingLayer, "passed")])
def test_buffers_of_a_model_that_recomputes_by_itself(subjects, layer, status):
    def build():
        return nn.Sequential(
            nn.Embedding(11, 8), nn.Sequential(*(layer() for _ in range(3))), nn.Linear(8, 11)
        )

    model = build().train()
    loss = model(torch.arange(8)[None]).square().mean()
    before = model[1][0].mean.clone()
    loss.backward()
    assert torch.equal(before, model[1][0].mean) == (status == "passed")
    assert subjects.ask(build, "recompute_gradients").status == status

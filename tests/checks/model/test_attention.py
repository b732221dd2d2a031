"""Attention, seen from outside: in models that call it by hand, by torch's function and by torch's module."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.subject.spec import ModelSpec


@pytest.fixture(scope="module")
def models(subjects):
    class Sharp(subjects.TinyLM):
        """Queries and keys of unit variance, as a wide model has them."""

        def __init__(self, n_heads=2):
            super().__init__(d_model=16, n_heads=n_heads)
            for layer in self.layers:
                nn.init.normal_(layer["qkv"].weight, std=0.25)

    class NotScaled(Sharp):
        def attend(self, layer, x):
            return super().attend(layer, x)

        def weigh(self, scores):
            return (scores * math.sqrt(16 / self.n_heads)).softmax(dim=-1)

    class NotScaledButSmall(NotScaled):
        def __init__(self):
            super().__init__()
            for layer in self.layers:
                nn.init.normal_(layer["qkv"].weight, std=0.02)

    class ByKernel(Sharp):
        scale = None

        def attend(self, layer, x):
            q, k, v = (self.split(y) for y in layer["qkv"](x).chunk(3, dim=-1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            return layer["out"](y.transpose(1, 2).flatten(2))

    class ByKernelNotScaled(ByKernel):
        scale = 1.0

    class Normed(Sharp):
        """No scale, and none is needed: queries and keys have unit length, times a learned factor."""

        def attend(self, layer, x):
            q, k, v = (self.split(y) for y in layer["qkv"](x).chunk(3, dim=-1))
            scores = 10 * F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
            scores = scores.masked_fill(~self.visible(x.shape[1]), -torch.inf)
            return layer["out"]((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))

    class Axis(Sharp):
        def weigh(self, scores):
            return scores.softmax(dim=-2)

    class Hard(Sharp):
        def __init__(self):
            super().__init__()
            for layer in self.layers:
                nn.init.normal_(layer["qkv"].weight, std=2.0)

    class Biased(Sharp):
        """Positions alone decide, as with slopes: that is no spread of content."""

        def weigh(self, scores):
            T = scores.shape[-1]
            return (scores - 50.0 * (torch.arange(T)[:, None] - torch.arange(T)).abs()).softmax(dim=-1)

    return {name: value for name, value in locals().items() if isinstance(value, type)}


@pytest.mark.parametrize("name", ["Sharp", "ByKernel"])
def test_scaled(subjects, models, name):
    result = subjects.ask(models[name], "attention_scale")
    assert result.status == "passed"
    assert result.value == pytest.approx(1.0, abs=0.3)
    assert result.limit == 8**0.35


class Patches(nn.Module):
    """Image classifier whose scores are divided by the root of a size."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.embed, self.qkv = nn.Conv2d(3, 48, 8, 8), nn.Linear(48, 144)
        self.head = nn.Linear(48, 5)

    def forward(self, images):
        x = self.embed(images).flatten(2).transpose(1, 2)
        q, k, v = (t.unflatten(-1, (8, 6)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / self.size**0.5
        return self.head((scores.softmax(-1) @ v).transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize("size, status", [(6, "passed"), (36, "passed"), (48, "warned"), (1, "warned")])
def test_scale_by_the_width_in_place_of_the_head_size(subjects, size, status):
    result = subjects.ask(lambda: Patches(size), "attention_scale")
    assert result.status == status
    assert ("root of the width (48)" in result.meaning) == (size == 48)


@pytest.mark.parametrize("name", ["NotScaled", "ByKernelNotScaled"])
def test_not_scaled(subjects, models, name):
    result = subjects.ask(models[name], "attention_scale")
    assert result.status == "failed"
    assert result.value == pytest.approx(math.sqrt(8), abs=0.7)


def test_a_scale_that_no_weight_makes_matter_is_only_unusual(subjects, models):
    assert subjects.ask(models["NotScaledButSmall"], "attention_scale").status == "warned"


def test_normed_queries_and_keys(subjects, models):
    result = subjects.ask(models["Normed"], "attention_scale")
    assert result.status == "passed"
    assert "do not grow" in result.meaning


def test_axis(subjects, models):
    result = subjects.ask(models["Axis"], "attention_axis")
    assert result.status == "failed"
    assert result.where == "softmax 1 of 2, over dimension -2"
    assert result.value > 0.1
    assert subjects.ask(models["Sharp"], "attention_axis").status == "passed"


@pytest.mark.parametrize(
    "name, status", [("Sharp", "passed"), ("NotScaled", "warned"), ("Hard", "failed"), ("Biased", "passed")]
)
def test_entropy(subjects, models, name, status):
    assert subjects.ask(models[name], "attention_entropy").status == status


def test_modules_of_torch(subjects):
    for factory in (subjects.encoder, subjects.causal_encoder()):
        for check in ("attention_axis", "attention_scale", "attention_entropy"):
            assert subjects.ask(factory, check).status == "passed"


@pytest.mark.parametrize("name", ["rack", "grouped_rack", "llama", "gpt2", "bert", "x_decoder"])
def test_models_of_others(subjects, name):
    result = subjects.ask(getattr(subjects, name), "attention_scale")
    assert result.status == "passed"
    assert result.value == pytest.approx(1.0, abs=0.4)


def test_initial_weights_of_queries_may_contain_the_scale(subjects):
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 64, "d_ff": 64, "num_layers": 1, "num_heads": 4, "d_kv": 16}
    config = transformers.T5Config(vocab_size=61, **sizes)
    result = subjects.ask(lambda: transformers.T5ForConditionalGeneration(config), "attention_scale")

    assert result.status == "passed"
    assert "initial weights of queries" in result.meaning


@pytest.mark.parametrize("check", ["attention_axis", "attention_scale", "attention_entropy"])
def test_models_without_attention(subjects, check):
    result = subjects.ask(subjects.gru, check)
    assert (result.status, result.meaning) == (
        "not applicable",
        "no softmax over (positions, positions) was seen",
    )


def test_the_factor_is_named(subjects):
    class ByTheWidth(subjects.TinyLM):
        def weigh(self, scores):
            return super().weigh(scores * 0.5)

    usual, other = (subjects.ask(build, "attention_scale") for build in (subjects.tiny, ByTheWidth))
    assert other.value == pytest.approx(usual.value / 2, rel=1e-3)
    assert "a factor of about 1 / sqrt(" in other.meaning


class ReturnsWeights(nn.Module):
    """Causal attention that returns its weights (B, 2, T, T)."""

    def __init__(self, returned="weights"):
        super().__init__()
        self.tokens, self.head, self.qkv = nn.Embedding(29, 16), nn.Linear(16, 29), nn.Linear(16, 48)
        self.returned = returned

    def forward(self, ids, output_attentions=False, output_hidden_states=False):
        x = self.tokens(ids)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / 8**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
        x = x + (weights @ v).transpose(1, 2).flatten(2)
        found = {
            "weights": weights,
            "scores": scores.tril(),
            "unmasked": scores.softmax(dim=-1),
            "states": x,
            "values": v,
        }
        attentions = (found[self.returned],) if output_attentions else None
        states = (x,) if output_hidden_states else None
        return SimpleNamespace(logits=self.head(x), attentions=attentions, hidden_states=states)


@pytest.mark.parametrize(
    ("returned", "status", "part"),
    [
        ("weights", "passed", ""),
        ("scores", "warned", "their sum for one query is above 1"),
        ("unmasked", "failed", "above 0 for later positions"),
        ("states", "failed", "a hidden state in place of"),
        ("values", "not applicable", ""),
    ],
)
def test_returned_attention(subjects, returned, status, part):
    result = subjects.ask(ModelSpec.of(lambda: ReturnsWeights(returned), causal=True), "returned_attention")
    assert result.status == status
    assert part in result.meaning


def test_returned_attention_without_hidden_states(subjects):
    class Plain(ReturnsWeights):
        def forward(self, ids, output_attentions=False):
            return super().forward(ids, output_attentions)

    assert subjects.ask(ModelSpec.of(Plain, causal=True), "returned_attention").status == "passed"


def test_returned_attention_needs_weights(subjects):
    assert subjects.ask(subjects.TinyLM, "returned_attention").status == "not applicable"

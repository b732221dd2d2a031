"""The first loss: against what theory says it is, on models that are too sure of themselves."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from stackwise.subject.facts import Facts
from stackwise.subject.spec import ModelSpec


class Bigram(nn.Module):
    """Logits that are one table: independent N(0, std^2), so that the loss is known."""

    def __init__(self, std, vocab_size=499):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
        nn.init.normal_(self.table.weight, std=std)

    def forward(self, ids):
        return self.table(ids)


class Tied(nn.Module):
    """Embedding and head are one weight, as wide as real ones."""

    def __init__(self, std, vocab_size=256, d_model=512):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.layer = nn.Linear(d_model, d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        nn.init.normal_(self.tokens.weight, std=std)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids)
        return self.head(x + self.layer(x).relu())


class FinalNorm(nn.Module):
    def __init__(self, norm, vocab_size=256, d_model=32):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=1.0)
        self.norm = norm
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=0.05)

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


@torch.no_grad()
def first_loss(factory, vocab_size):
    """Of many random targets, by its definition."""
    torch.manual_seed(0)
    logits = factory().eval()(torch.randint(vocab_size, (16, 16))).double()
    labels = torch.randint(vocab_size, (16, 16, 1))
    return (logits.exp().sum(-1).log() - logits.gather(-1, labels)[..., 0]).mean().item()


# Logits N(0, s^2) cost s^2 / 2 nats above ln(V).
@pytest.mark.parametrize(
    "std, status", [(0.0, "passed"), (0.3, "passed"), (0.6, "passed"), (1.7, "warned"), (3.0, "failed")]
)
def test_logits_of_known_size(subjects, std, status):
    result = subjects.ask(lambda: Bigram(std), "initial_loss")
    assert result.status == status
    # 64 targets: the mean of their logits scatters by std / 8.
    assert result.value == pytest.approx(std**2 / 2, abs=3 * std / 8 + 1e-5)
    assert result.limit == (2.0 if status == "failed" else 0.75)
    assert f"ln(499) = {math.log(499):.2f}" in result.meaning
    assert float(result.meaning.rpartition("std of logits ")[2].rstrip(".")) == pytest.approx(std, rel=0.02)


def test_large_tied_embedding(subjects):
    large = first_loss(lambda: Tied(1.0), 256)
    assert large > 100
    result = subjects.ask(lambda: Tied(1.0), "initial_loss")
    assert result.status == "failed"
    assert result.value == pytest.approx(large - math.log(256), rel=0.1)
    assert "embedding" in result.advice


def test_small_tied_embedding(subjects):
    assert abs(first_loss(lambda: Tied(0.01), 256) - math.log(256)) < 0.1
    assert subjects.ask(lambda: Tied(0.01), "initial_loss").status == "passed"


def test_missing_final_norm(subjects):
    assert first_loss(lambda: FinalNorm(nn.Identity()), 256) > 50
    result = subjects.ask(lambda: FinalNorm(nn.Identity()), "initial_loss")
    assert result.status == "failed"
    assert "final norm" in result.advice
    assert first_loss(lambda: FinalNorm(nn.LayerNorm(32)), 256) < math.log(256) + 0.2
    assert subjects.ask(lambda: FinalNorm(nn.LayerNorm(32)), "initial_loss").status == "passed"


@pytest.mark.parametrize("check", ["initial_loss", "tying"])
def test_classes_of_a_row_are_no_logits_over_tokens(subjects, check):
    class Classifier(Bigram):
        """As many classes as tokens, for each row."""

        def forward(self, ids):
            return super().forward(ids).mean(1)

    assert subjects.ask(lambda: Classifier(0.1), check).status == "not applicable"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite(subjects, value):
    class Broken(Bigram):
        def forward(self, ids):
            return super().forward(ids) + value

    result = subjects.ask(lambda: Broken(0.1), "initial_loss")
    assert result.status == "failed"
    assert not math.isfinite(result.value)


def test_a_loss_that_is_far_off_without_large_logits_is_only_unusual(subjects):
    class OneSure(Bigram):
        """One token of 499 is preferred: 0.3 of standard deviation, 1.7 nats."""

        def forward(self, ids):
            return super().forward(ids) * 0 + 8.0 * nn.functional.one_hot(torch.tensor(3), 499)

    assert first_loss(lambda: OneSure(0.0), 499) - math.log(499) > 1.5
    assert subjects.ask(lambda: OneSure(0.0), "initial_loss").status == "warned"


def test_trained_weights(subjects):
    spec = ModelSpec.of(lambda: Tied(1.0), trained=True)
    result = subjects.ask(spec, "initial_loss")
    assert (result.status, result.meaning) == ("not applicable", "the weights are trained")


def test_vectors(subjects):
    result = subjects.ask(subjects.encoder, "initial_loss")
    assert result.status == "not applicable"
    assert "needs token ids" in result.meaning


def test_outputs_that_are_no_logits(subjects):
    class Headless(Tied):
        def forward(self, ids):
            return self.layer(self.tokens(ids))

    result = subjects.ask(lambda: Headless(1.0, vocab_size=600), "initial_loss")
    assert result.status == "not applicable"
    assert result.meaning == "512 outputs are no logits over 600 tokens"


def test_padded_vocabulary(subjects):
    class Padded(Bigram):
        """Five tokens, and logits for 499."""

        def forward(self, ids):
            assert ids.max() < 5
            return super().forward(ids)

    spec = ModelSpec(lambda: Padded(0.1), "padded", "tokens", 5, causal=True)
    result = subjects.ask(spec, "initial_loss")
    assert result.status == "passed"
    assert "ln(499)" in result.meaning


def test_a_model_that_knows_the_next_token_of_nothing_random(subjects):
    class Copies(nn.Module):
        """Predicts its own input: a loss on the inputs would be 0."""

        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 50)
            with torch.no_grad():
                self.table.weight.copy_(torch.eye(50) * 20.0)

        def forward(self, ids):
            return self.table(ids)

    spec = ModelSpec.of(Copies, causal=False)
    with torch.no_grad():
        assert spec.loss_of(spec.create(), spec.batch(2, 8)) < 1e-3
    assert subjects.ask(spec, "initial_loss").status == "failed"


class Small(nn.Module):
    """A sound model, of which a mutant overrides one piece."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(29, 16)
        self.norm = nn.LayerNorm(16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.extra = self.more()
        self.head = nn.Linear(16, 29)
        self.reset()

    def more(self):
        return nn.Identity()

    def reset(self):
        nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + layer(self.norm(x)).tanh()
        return self.head(self.extra(x))


class Scale(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.scale = nn.Parameter(value)

    def forward(self, x):
        return x * self.scale


class Unset(Small):
    def more(self):
        return Scale(torch.empty(16))


class SetLater(Unset):
    def reset(self):
        nn.init.ones_(self.extra.scale)


class OwnGenerator(Small):
    def reset(self):
        self.head.weight.data = torch.tensor(np.random.default_rng().normal(size=(29, 16))).float()


class RoomForACache(Small):
    """Memory that is not saved, and written before it is read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.empty(4, 4), persistent=False)


def test_unset_memory(subjects):
    state = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    result = subjects.ask(Unset, "initialized")
    assert (result.status, result.where) == ("failed", "extra.scale")
    assert result.value == pytest.approx(1 / len(list(Unset().parameters())))
    after = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    assert after == state


@pytest.mark.parametrize("build", [Small, SetLater, RoomForACache])
def test_memory_that_is_set(subjects, build):
    assert subjects.ask(build, "initialized").status == "passed"


def test_a_generator_of_its_own(subjects):
    assert not torch.equal(OwnGenerator().head.weight, OwnGenerator().head.weight)
    result = subjects.ask(OwnGenerator, "initialized")
    assert (result.status, result.where) == ("failed", "head.weight")
    assert "generator" in result.advice


def test_one_sibling_that_was_left_out(subjects):
    class LeftOut(Small):
        def reset(self):
            super().reset()
            for layer in self.layers[:2]:
                nn.init.normal_(layer.weight, std=0.02)

    result = subjects.ask(LeftOut, "initialized")
    assert (result.status, result.where) == ("warned", "layers.2.weight")


class Hidden(Small):
    """Two layers of which the first starts constant."""

    def more(self):
        return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))

    def reset(self):
        super().reset()
        first, last = self.extra[0], self.extra[2]
        for p in (first.weight, first.bias, *([last.weight] if self.all_equal else [])):
            nn.init.constant_(p, 0.1)

    all_equal = True


class BrokenSymmetry(Hidden):
    """What reads the units tells them apart: they will differ."""

    all_equal = False


def test_symmetry(subjects):
    torch.manual_seed(0)
    model = Hidden()
    model(torch.arange(8)[None]).square().sum().backward()
    gradient = model.extra[0].weight.grad
    torch.testing.assert_close(gradient, gradient[:1].expand_as(gradient))
    result = subjects.ask(Hidden, "symmetry")
    assert (result.status, result.where) == ("failed", "extra.0.weight")
    assert subjects.ask(BrokenSymmetry, "symmetry").status == "passed"
    assert subjects.ask(Small, "symmetry").status == "passed"


class OnLoad(Small):
    def __init__(self):
        super().__init__()
        self.register_load_state_dict_post_hook(lambda model, keys: model.reset())


class OnFirstCall(Small):
    ready = False

    def forward(self, ids):
        if not self.ready:
            self.ready = True
            with torch.no_grad():
                self.reset()
        return super().forward(ids)


class Unsaved(Small):
    """Random features that are a buffer, and not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("features", torch.randn(16), persistent=False)

    def forward(self, ids):
        return super().forward(ids) + self.head(self.features)


class Saved(Unsaved):
    def __init__(self):
        super().__init__()
        self.register_buffer("features", self.features)


@pytest.mark.parametrize(
    "build, where",
    [
        (OnLoad, "head.weight, while loading"),
        (OnFirstCall, "head.weight, at the first call"),
        (Unsaved, "features, not in state_dict()"),
    ],
)
def test_weights_that_do_not_arrive(subjects, build, where):
    torch.manual_seed(0)
    source, target, ids = build().eval(), build().eval(), torch.arange(8)[None]
    source(ids)
    target.load_state_dict(source.state_dict())
    assert not torch.equal(source(ids), target(ids))
    result = subjects.ask(build, "load_round_trip")
    assert (result.status, result.where) == ("failed", where)


@pytest.mark.parametrize("build", [Small, Saved, "rack", "gpt2", "x_decoder", "gru"])
def test_weights_that_arrive(subjects, build):
    result = subjects.ask(getattr(subjects, build) if isinstance(build, str) else build, "load_round_trip")
    assert (result.status, result.value) == ("passed", 0.0)


@pytest.mark.parametrize("check", ["initialized", "symmetry"])
def test_trained_weights_are_not_asked(subjects, check):
    result = subjects.ask(ModelSpec.of(Small, trained=True), check)
    assert (result.status, result.meaning) == ("not applicable", "the weights are trained")


def test_modules_of_two_types_are_no_siblings(subjects):
    def build():
        return nn.Sequential(nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 50))

    assert subjects.ask(build, "initialized").status == "passed"


class Stack(nn.Module):
    """Embedding, a list of layers, head."""

    def __init__(self, layers):
        super().__init__()
        self.tokens, self.head = nn.Embedding(29, 16), nn.Linear(16, 29)
        self.layers = layers

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def test_shared_modules_warns_about_a_repeated_reference(subjects):
    def build():
        return Stack(nn.ModuleList([nn.Linear(16, 16)] * 3))

    result = subjects.ask(build, "shared_modules")
    assert (result.status, result.where, result.value) == ("warned", "layers.1, layers.2", 2.0)
    declared = ModelSpec.of(build, facts=Facts(block_weights=(0, 0, 0)))
    assert subjects.ask(declared, "shared_modules").status == "passed"
    for other in ((0, 0), (0, 1, 2)):
        wrong = ModelSpec.of(build, facts=Facts(block_weights=other))
        assert subjects.ask(wrong, "shared_modules").status == "warned"


def test_shared_modules_passes_a_shared_activation(subjects):
    def build():
        silu = nn.SiLU()
        return Stack(nn.Sequential(nn.Linear(16, 16), silu, nn.Linear(16, 16), silu))

    assert subjects.ask(build, "shared_modules").status == "passed"


class Resizable(nn.Module):
    """Embedding, and a head with a bias, for a vocabulary that can be resized."""

    keeps_bias, resizes_head = True, True

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(29, 16), nn.Linear(16, 29)

    def get_input_embeddings(self):
        return self.tokens

    @torch.no_grad()
    def resize_token_embeddings(self, n_tokens):
        n_kept = min(n_tokens, self.tokens.num_embeddings)
        old, self.tokens = self.tokens, nn.Embedding(n_tokens, 16)
        self.tokens.weight[:n_kept] = old.weight[:n_kept]
        if self.resizes_head:
            old_head, self.head = self.head, nn.Linear(16, n_tokens)
            self.head.weight[:n_kept] = old_head.weight[:n_kept]
            if self.keeps_bias:
                self.head.bias[:n_kept] = old_head.bias[:n_kept]

    def forward(self, ids):
        return self.head(self.tokens(ids))


@pytest.mark.parametrize(
    ("changes", "status", "where", "part"),
    [
        ({}, "passed", "", ""),
        ({"keeps_bias": False}, "failed", "3 more tokens", "The logits of the old tokens change"),
        ({"resizes_head": False}, "failed", "3 more tokens", "32 embeddings and 29 logits"),
    ],
)
def test_resized_vocabulary(subjects, changes, status, where, part):
    result = subjects.ask(type("Model", (Resizable,), changes), "resized_vocabulary")
    assert (result.status, result.where) == (status, where)
    assert part in result.meaning


def test_resized_vocabulary_of_normalised_outputs(subjects):
    class Normalised(Resizable):
        def forward(self, ids):
            return super().forward(ids).log_softmax(dim=-1)

    assert subjects.ask(Normalised, "resized_vocabulary").status == "passed"


def test_resized_vocabulary_may_be_rounded_up(subjects):
    class Rounded(Resizable):
        def resize_token_embeddings(self, n_tokens):
            super().resize_token_embeddings(64 * -(-n_tokens // 64))

    assert subjects.ask(Rounded, "resized_vocabulary").status == "passed"


def test_resized_vocabulary_needs_a_method(subjects):
    assert subjects.ask(subjects.TinyLM, "resized_vocabulary").status == "not applicable"

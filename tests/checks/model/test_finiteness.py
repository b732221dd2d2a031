"""NaN and infinity in outputs and gradients: found, counted, and traced to their place."""

import math

import pytest
import torch
from torch import nn

from stackwise.subject.spec import ModelSpec


@pytest.fixture(scope="module")
def models(subjects):
    class Sound(subjects.TinyLM):
        pass

    class NanWeight(subjects.TinyLM):
        """A weight that nothing initialised."""

        def __init__(self):
            super().__init__()
            with torch.no_grad():
                self.layers[1]["qkv"].weight[3, 3] = math.nan

    class LogOfZero(subjects.TinyLM):
        """Broken in the root's own code, between its modules."""

        def forward(self, ids):
            return super().forward(ids) - (ids[..., None] * 0.0).log()

    class EmptyRow(subjects.TinyLM):
        """The first query sees nothing: a softmax over an empty row."""

        def visible(self, seq_len):
            return torch.ones(seq_len, seq_len, dtype=torch.bool).tril(-1)

    class OneOutput(subjects.TinyLM):
        def forward(self, ids):
            return super().forward(ids).index_fill(-1, torch.tensor([3]), -math.inf)

    class InTraining(subjects.TinyLM):
        def mix(self, x):
            return x / 0 if self.training else x

    class InEval(subjects.TinyLM):
        def mix(self, x):
            return x if self.training else x / 0

    class Large(subjects.TinyLM):
        def forward(self, ids):
            return super().forward(ids) * 1e37

    class RootOfZero(subjects.TinyLM):
        """d sqrt(x) / dx at 0; the output itself is as it should be."""

        def __init__(self):
            super().__init__()
            self.zero = nn.Parameter(torch.zeros(4))

        def length(self):
            return self.zero.square().sum().sqrt()

        def forward(self, ids):
            return super().forward(ids) + self.length()

    class NormOfZero(RootOfZero):
        """The sound twin: torch defines this gradient as 0."""

        def length(self):
            return torch.linalg.vector_norm(self.zero)

    class MaskedBranch(subjects.TinyLM):
        """where() hides log(0) in the output, not 0 * inf in its gradient."""

        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.tensor([0.0, 1.0]))

        def forward(self, ids):
            return super().forward(ids) + torch.where(self.gate > 0, self.gate.log(), 0.0).sum()

    class AllGradients(subjects.TinyLM):
        def forward(self, ids):
            x = super().forward(ids)
            return x + (x - x).square().sum().sqrt()

    class Detached(subjects.TinyLM):
        def forward(self, ids):
            return super().forward(ids).detach()

    class NoGradient(subjects.TinyLM):
        @torch.no_grad()
        def forward(self, ids):
            return super().forward(ids)

    class DetachedInside(subjects.TinyLM):
        def mix(self, x):
            return x.detach()

    class Frozen(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)

    class HalfFrozen(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.tokens.requires_grad_(False)

    return {name: value for name, value in locals().items() if isinstance(value, type)}


@pytest.fixture
def every_warning():
    # torch gives many of its warnings only once in a process.
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@torch.no_grad()
def output_of(factory, train):
    torch.manual_seed(0)
    return factory().train(train)(torch.arange(12).view(2, 6))


def gradients_of(factory):
    torch.manual_seed(0)
    model = factory().train()
    output = model(torch.arange(12).view(2, 6))
    assert output.isfinite().all()
    output.square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "name, modes, place",
    [
        ("NanWeight", "both", "layers.1.qkv"),
        ("LogOfZero", "both", "(outside the submodules)"),
        ("EmptyRow", "both", "(outside the submodules)"),
        ("OneOutput", "both", "(outside the submodules)"),
        ("InEval", "eval", "(outside the submodules)"),
        ("InTraining", "train", "(outside the submodules)"),
    ],
)
def test_nonfinite_outputs(subjects, models, name, modes, place):
    finite = {
        mode: bool(output_of(models[name], mode == "train").isfinite().all()) for mode in ("eval", "train")
    }
    assert finite == {mode: modes not in (mode, "both") for mode in finite}
    result = subjects.ask(models[name], "finite_logits")
    assert (result.status, result.limit) == ("failed", 0.0)
    assert result.where == f"{'train' if modes == 'train' else 'eval'} mode; first in {place}"
    assert 0 < result.value <= 1


def test_how_many_outputs(subjects, models):
    result = subjects.ask(models["OneOutput"], "finite_logits")
    assert result.value == pytest.approx(1 / 29)
    assert result.meaning.startswith(f"{2 * 16} of {2 * 16 * 29} outputs")


@pytest.mark.parametrize(
    "place", ["layers.0.norm", "layers.1.mlp.1", "layers.0.out", "tokens", "head", "norm"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_place_is_named(subjects, place, value):
    class Broken(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            with torch.no_grad():
                self.get_submodule(place).weight.view(-1)[:8] = value

    # Rows 0 to 7 of an embedding may not be among the ids that are drawn.
    ids = torch.arange(8).repeat(2, 1)
    spec = ModelSpec.of(Broken, make_batch=lambda batch_size, seq_len, generator: ids)
    assert not output_of(Broken, train=False).isfinite().all()
    assert subjects.ask(spec, "finite_logits").where == f"eval mode; first in {place}"


@pytest.mark.parametrize(
    "name", ["Sound", "Large", "RootOfZero", "NormOfZero", "MaskedBranch", "Detached", "Frozen"]
)
def test_finite_outputs(subjects, models, name):
    assert output_of(models[name], train=False).isfinite().all()
    result = subjects.ask(models[name], "finite_logits")
    assert (result.status, result.value) == ("passed", 0.0)


@pytest.mark.parametrize("name, parameter", [("RootOfZero", "zero"), ("MaskedBranch", "gate")])
def test_one_gradient(subjects, models, name, parameter):
    gradients = gradients_of(models[name])
    assert [n for n, g in gradients.items() if not g.isfinite().all()] == [parameter]
    result = subjects.ask(models[name], "finite_gradients")
    assert (result.status, result.where, result.limit) == ("failed", parameter, 0.0)
    assert result.value == pytest.approx(1 / len(gradients))
    assert "the loss is finite" in result.meaning


def test_many_gradients(subjects, models):
    names = [n for n, g in gradients_of(models["AllGradients"]).items() if not g.isfinite().all()]
    assert len(names) > 3
    result = subjects.ask(models["AllGradients"], "finite_gradients")
    assert result.status == "failed"
    assert result.where == ", ".join(names[:3]) + ", ..."
    assert result.meaning.startswith(f"{len(names)} of ")


@pytest.mark.parametrize("name", ["Sound", "NormOfZero", "HalfFrozen", "DetachedInside"])
def test_sound_gradients(subjects, models, name):
    gradients = gradients_of(models[name])
    assert all(g.isfinite().all() for g in gradients.values())
    trainable = [p for p in models[name]().parameters() if p.requires_grad]
    result = subjects.ask(models[name], "finite_gradients")
    assert (result.status, result.value) == ("passed", 0.0)
    assert result.meaning.startswith(f"{len(gradients)} of {len(trainable)} parameters")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite(subjects, value, every_warning):
    spec = ModelSpec.of(subjects.tiny, loss=lambda model, inputs: model(inputs).mean() * 0 + value)
    result = subjects.ask(spec, "finite_gradients")
    assert (result.status, result.where) == ("failed", "the loss")
    assert result.value == value or (math.isnan(result.value) and math.isnan(value))


@pytest.mark.parametrize("name", ["Detached", "NoGradient"])
def test_output_that_is_cut_off(subjects, models, name):
    torch.manual_seed(0)
    assert not models[name]()(torch.arange(12).view(2, 6)).requires_grad
    result = subjects.ask(models[name], "finite_gradients")
    assert result.status == "failed"
    assert "cut off" in result.meaning
    assert "detach()" in result.advice


def test_loss_that_is_cut_off(subjects):
    spec = ModelSpec.of(subjects.tiny, loss=lambda model, inputs: torch.ones((), requires_grad=True) * 2)
    result = subjects.ask(spec, "finite_gradients")
    assert result.status == "failed"
    assert "cut off" in result.meaning


def test_nothing_to_train(subjects, models):
    result = subjects.ask(models["Frozen"], "finite_gradients")
    assert (result.status, result.meaning) == ("not applicable", "no parameter is trainable")


def test_no_parameters_at_all(subjects):
    spec = ModelSpec(lambda: nn.Identity(), "identity", "vectors", 3)
    assert subjects.ask(spec, "finite_gradients").status == "not applicable"
    assert subjects.ask(spec, "finite_logits").status == "passed"


def test_dropout_and_gradients_of_vectors(subjects):
    for spec in (
        ModelSpec.of(subjects.encoder),
        subjects.causal_encoder(),
        ModelSpec.of(subjects.dropout_rack),
    ):
        assert subjects.ask(spec, "finite_gradients").status == "passed"
        assert subjects.ask(spec, "finite_logits").status == "passed"


def test_one_position_has_no_next_token(subjects):
    # Nothing is wrong with the model: there is no loss to speak of.
    result = subjects.ask(ModelSpec.of(subjects.gru, seq_len=1), "finite_gradients")
    assert result.status in ("passed", "not applicable")


def test_outputs_that_are_no_logits(subjects):
    # A model without a head: ids in, hidden states out. initial_loss says so; this must not break.
    class Headless(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.head = nn.Identity()

    assert ModelSpec.of(Headless).width == 29
    assert output_of(Headless, train=False).shape[-1] == 16
    result = subjects.ask(Headless, "finite_gradients")
    assert result.status in ("passed", "not applicable")


def test_nan_that_does_not_show(subjects):
    class Swallowed(subjects.TinyLM):
        """One value of a projection is NaN, and the branch is mended afterwards."""

        def __init__(self):
            super().__init__()
            with torch.no_grad():
                self.layers[1]["qkv"].weight[3, 3] = math.nan

        def attend(self, layer, x):
            return super().attend(layer, x).nan_to_num()

    assert output_of(Swallowed, train=False).isfinite().all()
    result = subjects.ask(Swallowed, "finite_logits")
    assert (result.status, result.where) == ("failed", "eval mode; first in layers.1.qkv")
    assert "does not show in the output" in result.meaning


def test_a_masked_softmax_that_is_masked_in_turn(subjects):
    class Masked(subjects.TinyLM):
        """The first position sees nothing, and its weights are set to 0: unusual, not wrong."""

        def __init__(self):
            super().__init__()
            self.soft = nn.Softmax(dim=-1)

        def visible(self, seq_len):
            return torch.ones(seq_len, seq_len, dtype=torch.bool).tril(-1)

        def weigh(self, scores):
            return self.soft(scores).masked_fill(scores.isneginf(), 0.0)

    result = subjects.ask(Masked, "finite_logits")
    assert (result.status, result.where) == ("warned", "eval mode; first in soft")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights(subjects, value):
    class Broken(subjects.TinyLM):
        """In the row of a token that is never drawn."""

        def __init__(self):
            super().__init__()
            with torch.no_grad():
                self.tokens.weight[28, 0] = value

    spec = ModelSpec.of(Broken, width=28)
    assert subjects.ask(spec, "finite_logits").status == "passed"
    result = subjects.ask(spec, "finite_weights")
    assert (result.status, result.where) == ("failed", "tokens.weight")


def test_masks_are_no_weights(subjects):
    class Masks(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
            self.register_buffer("room", torch.full((4,), math.nan), persistent=False)

    assert subjects.ask(Masks, "finite_weights").status == "passed"
    assert subjects.ask(ModelSpec(nn.Identity, "identity", "vectors", 3), "finite_weights").meaning

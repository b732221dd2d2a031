"""Gradients: which parameters get one, and whether it is the derivative."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from stackwise.checks import check_model
from stackwise.subject.spec import ModelSpec
from tests.zoo.gpt import GPT, spec_of


@pytest.fixture(scope="module")
def models(subjects):
    class Sound(subjects.TinyLM):
        pass

    class ZeroBranch(subjects.TinyLM):
        """A branch that starts switched off: sound, its weights learn from the second step on."""

        def __init__(self):
            super().__init__()
            for layer in self.layers:
                nn.init.zeros_(layer["out"].weight)
                nn.init.zeros_(layer["out"].bias)

    class DeadBranch(subjects.TinyLM):
        def attend(self, layer, x):
            return 0 * super().attend(layer, x)

    class DetachedLayer(subjects.TinyLM):
        def attend(self, layer, x):
            return super().attend(layer, x).detach()

    class NotCalled(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.pooler = nn.Linear(16, 16)

    class HalfGradient(subjects.TinyLM):
        def mix(self, x):
            return (x + x.detach()) / 2

    class WrongBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sin()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class Custom(subjects.TinyLM):
        def mix(self, x):
            return WrongBackward.apply(x)

    class RightBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0].cos()

    class CustomSound(subjects.TinyLM):
        def mix(self, x):
            return RightBackward.apply(x)

    class Shifted(subjects.TinyLM):
        """The largest score is subtracted as a constant: exact, since it cancels."""

        def weigh(self, scores):
            e = (scores - scores.amax(dim=-1, keepdim=True).detach()).exp()
            return e / e.sum(dim=-1, keepdim=True)

    class Narrow(subjects.TinyLM):
        """Its own code goes through float32, also in a float64 model."""

        def mix(self, x):
            return x.float().sin().to(x.dtype)

    class Rounded(subjects.TinyLM):
        """Straight through a step function: the gradient is a choice."""

        def mix(self, x):
            return x + (torch.round(8 * x) / 8 - x).detach()

    class Quantised(subjects.TinyLM):
        """Straight through the nearest of some codes, as in a vector-quantised autoencoder."""

        def mix(self, x):
            codes = self.tokens.weight[:4]
            return x + (codes[torch.cdist(x.flatten(0, -2), codes).argmin(-1)].view_as(x) - x).detach()

    class Relu(subjects.TinyLM):
        def mix(self, x):
            return x.relu() - 0.1 * (-x).relu()

    class Kink(subjects.TinyLM):
        """Where relu bends, exactly: one-sided slopes differ."""

        def mix(self, x):
            return x + (x - x.detach()).relu()

    class Padded(subjects.TinyLM):
        """The padding row of an embedding gets no gradient, by design."""

        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(29, 16, padding_idx=3)

    class Frozen(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)

    class PartFrozen(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.places.requires_grad_(False)

    class ThawedByEval(subjects.TinyLM):
        def train(self, mode=True):
            self.places.requires_grad_(mode)
            return super().train(mode)

    return {name: value for name, value in locals().items() if isinstance(value, type)}


def gradients(build):
    torch.manual_seed(0)
    model = build()
    model(torch.arange(12).view(2, 6)).square().sum().backward()
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["Sound", "ZeroBranch", "HalfGradient", "Custom", "Narrow", "Padded"])
def test_flow(subjects, models, name):
    assert any(g is not None and g.any() for g in gradients(models[name]).values())
    result = subjects.ask(models[name], "gradient_flow")
    assert (result.status, result.value) == ("passed", 0.0)


def test_a_branch_at_zero_has_no_gradient_at_first(models):
    missing = [n for n, g in gradients(models["ZeroBranch"]).items() if not g.any()]
    assert "layers.0.qkv.weight" in missing


def test_head_that_starts_at_zero_has_a_gradient(subjects):
    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)))

    assert subjects.ask(Denoiser, "gradient_flow").status == "passed"


def test_cut_off(subjects, models):
    missing = [n for n, g in gradients(models["DetachedLayer"]).items() if g is None]
    result = subjects.ask(models["DetachedLayer"], "gradient_flow")
    assert result.status == "failed"
    assert result.value == pytest.approx(len(missing) / len(gradients(models["Sound"])))
    assert result.where == f"{', '.join(missing[:3])} and {len(missing) - 3} more"
    assert "detach()" in result.advice


def test_dead(subjects, models):
    dead = [n for n, g in gradients(models["DeadBranch"]).items() if g is not None and not g.any()]
    assert "layers.0.qkv.weight" in dead
    result = subjects.ask(models["DeadBranch"], "gradient_flow")
    assert result.status == "failed"
    assert set(result.where.partition(" and ")[0].split(", ")) <= set(dead)
    assert "multiplied by 0" in result.advice


class WithPooler(nn.Module):
    """Language model whose body also returns a pooled state, which the loss does not use."""

    def __init__(self, returned=True):
        super().__init__()
        self.body, self.head = nn.Module(), nn.Linear(16, 29)
        self.body.tokens, self.body.pooler = nn.Embedding(29, 16), nn.Linear(16, 16)
        self.body.forward = self.states
        self.returned = returned

    def states(self, ids):
        x = self.body.tokens(ids)
        pooled = self.body.pooler(x[:, 0]).tanh()
        return (x, pooled) if self.returned else (x,)

    def forward(self, ids):
        return self.head(self.body(ids)[0])


class WithImages(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(29, 16), nn.Linear(16, 29)
        self.patches = nn.Linear(8, 16)

    def forward(self, ids, pixel_values=None):
        x = self.tokens(ids)
        return self.head(x if pixel_values is None else x + self.patches(pixel_values))


class WithIndexer(nn.Module):
    """Causal model that averages over a top k of earlier positions, chosen by scores without a gradient."""

    def __init__(self):
        super().__init__()
        self.tokens, self.scores, self.head = nn.Embedding(29, 16), nn.Linear(16, 1), nn.Linear(16, 29)

    def forward(self, ids):
        x = self.tokens(ids)
        T = ids.shape[1]
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        scores = self.scores(x).transpose(1, 2).expand(-1, T, -1).masked_fill(future, -torch.inf)
        chosen = torch.zeros(len(ids), T, T, dtype=x.dtype).scatter(-1, scores.topk(2).indices, 1.0)
        return self.head(x + chosen.masked_fill(future, 0.0) @ x)


@pytest.mark.parametrize(
    "build, status, part",
    [
        (WithPooler, "passed", "is returned"),
        (lambda: WithPooler(returned=False), "failed", "their modules run"),
        (WithImages, "passed", "images"),
        (WithIndexer, "passed", "top k"),
    ],
)
def test_parameters_that_this_loss_does_not_use(subjects, build, status, part):
    result = subjects.ask(ModelSpec.of(build, causal=True), "gradient_flow")
    assert result.status == status, result
    assert part in result.meaning


def test_inputs_outside_a_top_k_of_positions_have_no_effect(subjects):
    result = subjects.ask(ModelSpec.of(WithIndexer, causal=True), "token_effect")
    assert (result.status, result.value > 0) == ("passed", True)


def test_a_module_that_is_not_called(subjects, models):
    assert gradients(models["NotCalled"])["pooler.weight"] is None
    result = subjects.ask(models["NotCalled"], "gradient_flow")
    assert (result.status, result.where) == ("warned", "pooler.weight, pooler.bias")
    assert "in modules that are never called: 2." in result.meaning
    declared = ModelSpec.of(models["NotCalled"], unused=("pooler",))
    assert subjects.ask(declared, "gradient_flow").status == "passed"


class Layer(nn.Module):
    def __init__(self, calls_adapter):
        super().__init__()
        self.map, self.adapter = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.calls_adapter = calls_adapter

    def forward(self, x):
        y = self.map(x).tanh()
        return x + (self.adapter(y) if self.calls_adapter else y)


class LayerOfContext(Layer):
    def forward(self, x, context=None):
        return super().forward(x) + (0 if context is None else self.adapter(context))


class LayerOfModes(Layer):
    def forward(self, x, mode="text"):
        return super().forward(x) if mode == "text" else x + self.adapter(x)


class LayerOfLanguages(nn.Module):
    """An attribute selects the adapter."""

    language = "en"

    def __init__(self, _):
        super().__init__()
        self.map = nn.Linear(16, 16)
        self.adapters = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 16)) for name in ("en", "de")}
        )

    def forward(self, x):
        return x + self.adapters[self.language](self.map(x).tanh())


class LayerOfTwoNorms(nn.Module):
    """Each layer uses its first norm twice, and never the second one."""

    def __init__(self, _):
        super().__init__()
        self.norm1, self.norm2, self.map = nn.LayerNorm(16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return self.norm1(x + self.map(self.norm1(x)))


class LayerOfExperts(nn.Module):
    """The router never chooses the last expert, which runs on no tokens."""

    def __init__(self, _):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        chosen = torch.arange(x.shape[1]) % 2
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y[:, chosen == i] += expert(x[:, chosen == i])
        return x + y


class LayerOfBlocks(Layer):
    """Its adapter reads blocks of 32 positions."""

    def forward(self, x):
        self.calls_adapter = x.shape[1] >= 32
        return super().forward(x)


class Layers(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.tokens, self.head = nn.Embedding(29, 16), nn.Linear(16, 29)
        self.layers = nn.Sequential(*layers)

    def forward(self, ids):
        return self.head(self.layers(self.tokens(ids)))


@pytest.mark.parametrize(
    ("kind", "calls", "status"),
    [
        (Layer, (True, True), "passed"),
        (Layer, (True, False), "warned"),
        (Layer, (False, False), "failed"),
        (LayerOfContext, (False, False), "warned"),
        (LayerOfModes, (False, False), "warned"),
        (LayerOfLanguages, (False, False), "warned"),
        (LayerOfTwoNorms, (False, False), "failed"),
        (LayerOfExperts, (False, False), "warned"),
        (LayerOfBlocks, (False, False), "passed"),
    ],
)
def test_a_part_that_no_layer_calls_is_a_failure(subjects, kind, calls, status):
    result = subjects.ask(lambda: Layers(*(kind(calls_it) for calls_it in calls)), "gradient_flow")
    assert result.status == status
    assert status == "passed" or any(name in result.where for name in (".adapter", ".norm2", ".experts.2"))


class BreaksOutOfTheLoop(Layers):
    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
            break
        return self.head(x)


def test_layers_after_the_end_of_the_loop_are_never_called(subjects):
    result = subjects.ask(
        lambda: BreaksOutOfTheLoop(*(LayerOfTwoNorms(True) for _ in range(3))), "gradient_flow"
    )
    assert (result.status, "return inside the loop" in result.advice) == ("failed", True)
    assert result.where.startswith("layers.1.")


class UnreadParameter(nn.Module):
    """Without positions, the class token is never added."""

    def __init__(self, *, reads=False):
        super().__init__()
        self.tokens, self.head = nn.Embedding(29, 16), nn.Linear(16, 29)
        self.class_token = nn.Parameter(torch.zeros(16))
        self.reads = reads

    def forward(self, ids):
        return self.head(self.tokens(ids) + (self.class_token if self.reads else 0))


@pytest.mark.parametrize(("reads", "status"), [(True, "passed"), (False, "failed")])
def test_a_parameter_that_forward_does_not_read(subjects, reads, status):
    result = subjects.ask(lambda: UnreadParameter(reads=reads), "gradient_flow")
    assert (result.status, result.where) == (status, "" if reads else "class_token")
    declared = ModelSpec.of(UnreadParameter, unused=("class_token",))
    assert subjects.ask(declared, "gradient_flow").status == "passed"


@pytest.mark.parametrize("name", ["Frozen"])
def test_nothing_to_train(subjects, models, name):
    for check in ("gradient_flow", "gradient_exact"):
        result = subjects.ask(models[name], check)
        assert (result.status, result.meaning) == ("not applicable", "no parameter is trainable")


@pytest.mark.parametrize(
    "name", ["Sound", "ZeroBranch", "CustomSound", "Shifted", "Relu", "Padded", "DeadBranch"]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_exact(subjects, models, name, seed):
    result = subjects.ask(models[name], "gradient_exact", seed=seed)
    assert result.status == "passed"
    assert result.value <= result.limit <= 1e-4


def test_a_model_that_goes_through_float32_on_its_own(subjects, models):
    result = subjects.ask(models["Narrow"], "gradient_exact")
    assert result.status == "passed"
    assert result.limit == 1e-5  # the cast was lifted


@pytest.mark.parametrize("name", ["HalfGradient", "Custom", "DetachedLayer"])
def test_not_exact(subjects, models, name):
    result = subjects.ask(models[name], "gradient_exact")
    assert result.status == "failed"
    assert result.value > 100 * result.limit
    assert result.where
    if name == "DetachedLayer":
        assert result.where.startswith("layers.")
        assert "detach()" in result.advice
    else:
        assert "backward" in result.advice


def test_the_parameter_is_named(subjects):
    class Hooked(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.layers[1]["out"].weight.register_hook(lambda gradient: gradient * 1.1)

    result = subjects.ask(Hooked, "gradient_exact")
    assert (result.status, result.where) == ("failed", "layers.1.out.weight")


class WithAuxiliaryGradient(torch.autograd.Function):
    """Return the input, and add the gradient of a loss in the backward pass, as Megatron-LM does."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones_like(ctx.saved_tensors[0])


@pytest.mark.parametrize("check", ["gradient_exact", "batch_invariance", "loss_gradient"])
def test_added_auxiliary_gradient_is_no_error(check):
    class Balanced(GPT):
        def mlp(self, layer, x):
            y = super().mlp(layer, x)
            return WithAuxiliaryGradient.apply(y, 0.01 * y.square().mean()) if self.training else y

    [result] = check_model(spec_of(Balanced), checks=[check])
    assert result.status == "passed", result


def test_quotients_of_python_numbers_are_no_error(subjects):
    class Chunked(subjects.TinyLM):
        def mix(self, x):
            n_chunks = torch.div(x.shape[1], 2, rounding_mode="trunc")
            return x + 0 * n_chunks

    assert subjects.ask(Chunked, "gradient_exact").status == "passed"


def test_step_functions_are_a_choice(subjects, models):
    for name in ("Rounded", "Quantised"):
        assert subjects.ask(models[name], "gradient_exact").status == "warned", name


def test_a_kink_is_no_error(subjects, models):
    # Half of the slope is what finite differences see, and none is what autograd takes.
    assert subjects.ask(models["Kink"], "gradient_exact").status in ("passed", "not applicable")


def test_steps_that_cut_most_of_the_model_off(subjects):
    class Rounded(subjects.TinyLM):
        def head_of(self, x):
            return torch.round(16 * x) / 16

        def mix(self, x):
            return self.head_of(x)

    class StraightThrough(Rounded):
        def head_of(self, x):
            return x + (super().head_of(x) - x).detach()

    assert sum(g is None or not g.any() for g in gradients(Rounded).values()) > len(gradients(Rounded)) / 2
    result = subjects.ask(Rounded, "gradient_flow")
    assert result.status == "failed"
    assert result.value > result.limit
    assert "large changes" in result.meaning
    assert "straight through" in result.advice
    assert subjects.ask(StraightThrough, "gradient_flow").status == "passed"


def test_an_output_without_gradient(subjects):
    detached = subjects.wrapped(lambda logits: logits.detach())
    result = subjects.ask(detached, "gradient_exact")
    assert result.status == "failed"
    assert "no gradient at all" in result.meaning


class FrozenHead(nn.Module):
    """An adapter on a frozen base, whose new head does not train (peft#2646)."""

    def __init__(self, head=False):
        super().__init__()
        self.base, self.scale = nn.Embedding(29, 16), nn.Parameter(torch.ones(16), requires_grad=False)
        self.adapter, self.head = nn.Linear(16, 16), nn.Linear(16, 29)
        self.base.requires_grad_(False)
        self.head.requires_grad_(head)
        self.alias = self.base

    def forward(self, ids):
        return self.head(self.adapter(self.base(ids)) * self.scale)


@pytest.mark.parametrize(
    ("head", "frozen", "status", "where"),
    [
        (False, ("base",), "failed", "scale, head.weight, head.bias"),
        (False, (), "warned", "scale, base.weight, head.weight"),
        (True, ("base",), "warned", "scale"),  # a constant
        (True, ("base", "scale"), "passed", ""),
        (True, ("base", "scale", "alias"), "passed", ""),  # a second name of the same weight
        (True, ("base", "scale", "decoder"), "failed", "decoder"),
    ],
)
def test_frozen_parameters_beside_declared_ones(subjects, head, frozen, status, where):
    result = subjects.ask(ModelSpec.of(lambda: FrozenHead(head), frozen=frozen), "trainable")
    assert result.status == status, result
    assert result.where.startswith(where)


def test_trainable(subjects, models):
    assert subjects.ask(models["Sound"], "trainable").status == "passed"
    result = subjects.ask(models["PartFrozen"], "trainable")
    assert (result.status, result.where) == ("warned", "places.weight")
    assert "frozen=" in result.advice
    for name in ("unused", "frozen"):
        declared = ModelSpec.of(models["PartFrozen"], **{name: ("places",)})
        assert subjects.ask(declared, "trainable").status == "passed"
    result = subjects.ask(ModelSpec.of(models["Sound"], frozen=("places",)), "trainable")
    assert (result.status, result.where) == ("failed", "places.weight")
    result = subjects.ask(models["ThawedByEval"], "trainable")
    assert (result.status, result.where) == ("failed", "places.weight")
    assert "eval()" in result.meaning


def test_frozen_bias_that_only_chooses_experts(subjects):
    class Routed(subjects.TinyLM):
        def __init__(self):
            super().__init__()
            self.expert_bias = nn.Parameter(torch.zeros(4), requires_grad=False)

        def mix(self, x):
            chosen = (x[..., :4].detach() + self.expert_bias).argmax(-1, keepdim=True)
            return x * (1 + chosen)

    assert subjects.ask(Routed, "trainable").status == "passed"


@pytest.mark.parametrize("name", ["rack", "llama", "gpt2", "bert", "x_decoder", "gru", "conv", "encoder"])
def test_models_of_others(subjects, name):
    for check in ("gradient_flow", "gradient_exact", "trainable"):
        result = subjects.ask(getattr(subjects, name), check)
        assert result.status == "passed", result


class TwoRowNorm(nn.Module):
    """Batch norm of one value per row: with two rows it is almost a step function."""

    def __init__(self):
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 8, 32), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8, eps=1e-14)
        nn.init.constant_(self.convolution.weight, 1e-9)

    def forward(self, images):
        return self.head(self.norm(self.convolution(images).flatten(1)))


def test_slope_that_depends_on_the_step_is_no_evidence(subjects):
    assert subjects.ask(TwoRowNorm, "gradient_exact").status in ("passed", "not applicable")


class ClassToken(nn.Module):
    """The head reads the first position, which the last layer does not mix with the others."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            others = layer(x[:, 1:]) + x.mean(1, keepdim=True)
            x = torch.cat([x[:, :1] + x.mean(1, keepdim=True), others], dim=1)
        return self.head(x[:, 0])


class DeadClassToken(ClassToken):
    """The output of the layers is multiplied by 0."""

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + 0.0 * layer(x)
        return self.head(x.mean(1))


class ClassTokenBlock(nn.Linear):
    """The first position gets the mean of the stream only."""

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        return torch.cat([x[:, :1] + mean, x[:, 1:] + super().forward(x[:, 1:]) + mean], dim=1)


class ClassTokenBlocks(ClassToken):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(ClassTokenBlock(8, 8) for _ in range(2))

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


def test_parameters_behind_a_class_token_are_unusual(subjects):
    result = subjects.ask(ClassToken, "gradient_flow")
    assert (result.status, result.where) == ("warned", "layers.1.weight")
    assert "class token" in result.advice


class ConstantWeight(nn.Module):
    """A weight that a softmax over one entry replaces by 1."""

    def __init__(self):
        super().__init__()
        self.score, self.out = nn.Parameter(torch.randn(8, 1)), nn.Linear(8, 8)

    def forward(self, x):
        return self.out((x @ self.score).softmax(-1) * x)


def test_parameter_that_changes_no_module_is_a_mistake(subjects):
    class Pooled(ClassToken):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(ConstantWeight() for _ in range(2))

        def forward(self, ids):
            x = self.embedding(ids)
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x.mean(1))

    result = subjects.ask(Pooled, "gradient_flow")
    assert (result.status, result.where) == ("failed", "layers.0.score, layers.1.score")


def test_parameters_of_positions_that_the_head_does_not_read(subjects):
    result = subjects.ask(ClassTokenBlocks, "gradient_flow")
    assert (result.status, result.where) == ("passed", "layers.1.weight, layers.1.bias")
    assert "positions that the head does not read" in result.meaning


def test_a_branch_without_effect_before_a_head_for_rows(subjects):
    result = subjects.ask(DeadClassToken, "gradient_flow")
    assert result.status == "failed"
    assert "multiplied by 0" in result.advice


class FusedCrossEntropy(torch.autograd.Function):
    """Mean over the labels that are not ignored. Its gradient is divided by `count`, if there is one."""

    @staticmethod
    def forward(ctx, logits, targets, count):
        real = targets != -100
        safe = targets.clamp(min=0)
        nll = -logits.log_softmax(-1).gather(-1, safe[:, None])[:, 0]
        gradient = logits.softmax(-1) - nn.functional.one_hot(safe, logits.shape[-1])
        ctx.save_for_backward(gradient * real[:, None] / (count or real.sum()))
        return (nll * real).sum() / real.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None, None


class FusedLoss(GPT):
    def loss(self, logits, labels):
        targets = labels[:, 1:].flatten()
        return FusedCrossEntropy.apply(logits[:, :-1].flatten(0, 1), targets, self.count(targets))

    def count(self, targets):
        return 0


class DividedByAll(FusedLoss):
    def count(self, targets):
        return len(targets)


class DividedByAllInTrainMode(FusedLoss):
    def count(self, targets):
        return len(targets) if self.training else 0


class WithZLoss(GPT):
    """A term that no formula knows."""

    def loss(self, logits, labels):
        return super().loss(logits, labels) + 0.1 * logits.logsumexp(-1).square().mean()


class ZLossDetached(GPT):
    def loss(self, logits, labels):
        size = logits.logsumexp(-1)
        return super().loss(logits, labels) + 0.1 * (size * size.detach()).mean()


class Normalized(GPT):
    """A batch norm, whose statistics each call in train mode updates."""

    def __init__(self):
        super().__init__()
        self.statistics = nn.BatchNorm1d(self.width)

    def embed(self, input_ids):
        return self.statistics(super().embed(input_ids).transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    "build, where",
    [
        (GPT, None),
        (FusedLoss, None),
        (WithZLoss, None),
        (Normalized, None),
        (DividedByAll, "eval mode, some labels ignored"),
        (DividedByAllInTrainMode, "train mode, some labels ignored"),
        (ZLossDetached, "eval mode, all labels"),
    ],
)
def test_gradient_of_the_own_loss(subjects, build, where):
    result = subjects.ask(spec_of(build), "loss_gradient")
    assert result.status == ("failed" if where else "passed"), result
    if where:
        assert result.where.startswith(where)
        assert result.value > 100 * result.limit


def test_declared_loss_is_tested_beside_the_loss_of_the_labels(subjects):
    def detached(model, inputs):
        loss = model(inputs, labels=inputs).loss
        return loss + 0.5 * (loss.detach() - loss)

    result = subjects.ask(spec_of(loss=detached), "loss_gradient")
    assert result.status == "failed"
    assert "declared loss" in result.where


def test_gradient_of_a_declared_loss(subjects, models):
    def spec(loss):
        return ModelSpec.of(models["Sound"], loss=lambda model, ids: loss(model(ids)).mean())

    assert subjects.ask(spec(torch.sin), "loss_gradient").status == "passed"
    assert subjects.ask(spec(lambda z: z * z.detach()), "loss_gradient").status == "failed"
    assert subjects.ask(models["Sound"], "loss_gradient").status == "not applicable"


def log_probabilities(model, ids):
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])


def policy_loss(model, ids):
    """The usual loss of an on-policy policy gradient: the ratio is always 1."""
    logp = log_probabilities(model, ids)
    return -((logp - logp.detach()).exp() * ids[:, 1:, None]).mean()


@pytest.mark.parametrize(
    "loss, status",
    [
        (policy_loss, "not applicable"),
        (lambda model, ids: policy_loss(model, ids) + model(ids).square().mean(), "not applicable"),
        (lambda model, ids: (p := model(ids).exp()).div(p.detach()).mean(), "not applicable"),
        (lambda model, ids: (model(ids) * model(ids).detach()).mean(), "failed"),
    ],
    ids=["ratio", "ratio and penalty", "quotient", "detached factor"],
)
def test_surrogate_losses_have_no_finite_difference(subjects, models, loss, status):
    result = subjects.ask(ModelSpec.of(models["Sound"], loss=loss), "loss_gradient")
    assert result.status == status
    assert (status == "failed") != ("surrogate" in result.meaning)


class Routed(nn.Module):
    """A factor per token, chosen by a router."""

    normalized = False

    def __init__(self):
        super().__init__()
        self.embedding, self.gate, self.head = nn.Embedding(29, 16), nn.Linear(16, 3), nn.Linear(16, 29)
        self.register_buffer("factors", torch.randn(3, 16))

    def forward(self, ids):
        x = self.embedding(ids)
        weight, index = self.gate(x).softmax(-1).topk(1)
        if self.normalized:
            weight = weight / weight.sum(-1, keepdim=True)
        return self.head(x + (weight[..., None] * self.factors[index] * x[..., None, :]).sum(-2))


class RoutedWithoutGradient(Routed):
    normalized = True


class RoutedByArgmax(Routed):
    """The choice of the factor has no gradient."""

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + self.factors[self.gate(x).argmax(-1)] * x)


def test_a_router_that_only_selects_is_a_warning(subjects):
    result = subjects.ask(RoutedByArgmax, "gradient_flow")
    assert (result.status, result.where) == ("warned", "gate.weight, gate.bias")
    assert "whose large changes change the output: 2." in result.meaning


def square(model, ids):
    return model(ids).square().mean()


@pytest.mark.parametrize(
    "build, loss, status",
    [
        (Routed, None, "passed"),
        (Routed, square, "passed"),
        (RoutedWithoutGradient, None, "failed"),
        (RoutedWithoutGradient, square, "failed"),
        # A balancing loss does not tell the router which expert is better.
        (RoutedWithoutGradient, lambda m, ids: square(m, ids) + m.gate.weight.square().mean(), "failed"),
    ],
)
def test_rounding_noise_is_no_gradient(subjects, build, loss, status):
    torch.manual_seed(0)
    gate = build().double().gate.weight
    result = subjects.ask(ModelSpec.of(build, loss=loss), "gradient_flow")
    assert gate.requires_grad
    assert (result.status, result.where) == (status, "" if status == "passed" else "gate.weight")


class ResidualLayer(nn.Linear):
    def forward(self, x):
        return x + super().forward(x).sin()


class AuxiliaryHead(nn.Module):
    """The own loss has a term of a second head, whose inputs are detached."""

    has_gradient = True

    def __init__(self):
        super().__init__()
        self.embedding, self.head, self.ahead = nn.Embedding(61, 16), nn.Linear(16, 61), nn.Linear(16, 61)
        self.layers = nn.ModuleList(ResidualLayer(16, 16) for _ in range(3))

    def forward(self, input_ids, labels=None):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        logits, loss = self.head(x), None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            x = x[:, :-2].detach().requires_grad_(self.has_gradient)
            ahead = checkpoint(self.ahead, x, use_reentrant=True)
            loss = loss + F.cross_entropy(ahead.flatten(0, 1), labels[:, 2:].flatten())
        return SimpleNamespace(logits=logits, loss=loss)


class AuxiliaryHeadCut(AuxiliaryHead):
    """No input of the reentrant checkpoint needs a gradient, so that it gives none."""

    has_gradient = False


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    "build, flow, loss", [(AuxiliaryHead, "passed", "warned"), (AuxiliaryHeadCut, "failed", "failed")]
)
def test_gradient_of_an_auxiliary_head(subjects, build, flow, loss):
    spec = ModelSpec.of(build)
    result = subjects.ask(spec, "gradient_flow")
    assert (result.status, "ahead.weight" in result.where) == (flow, flow == "failed")
    assert subjects.ask(spec, "loss_gradient").status == loss


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_can_be_asked(subjects):
    assert subjects.ask(ModelSpec.of(AuxiliaryHead), "gradient_exact").status == "passed"


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


class WrongGradientBesideAnAuxiliaryHead(AuxiliaryHead):
    def forward(self, input_ids, labels=None):
        output = super().forward(input_ids, labels)
        logits = HalfGradient.apply(output.logits)
        if labels is not None:
            output.loss = output.loss + F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=output.loss)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_auxiliary_head_does_not_excuse_a_wrong_gradient(subjects):
    spec = ModelSpec.of(WrongGradientBesideAnAuxiliaryHead)
    assert subjects.ask(spec, "loss_gradient").status == "failed"


class LastState(nn.Module):
    """Classifier of sequences. At the last position, the backward direction has read one vector."""

    reads_last = True

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, bidirectional=True, batch_first=True), nn.Linear(16, 3)

    def forward(self, x):
        y, _ = self.lstm(x)
        return self.head(y[:, -1] if self.reads_last else torch.cat((y[:, -1, :8], y[:, 0, 8:]), dim=-1))


class FinalStates(LastState):
    reads_last = False


@pytest.mark.parametrize(
    ("build", "status", "where"),
    [(FinalStates, "passed", ""), (LastState, "failed", "lstm.weight_hh_l0_reverse")],
)
def test_a_direction_that_is_read_after_one_step(subjects, build, status, where):
    spec = ModelSpec.of(build, inputs="vectors", width=6, per_position=False)
    result = subjects.ask(spec, "gradient_flow")
    assert (result.status, result.where) == (status, where)


class Refined(nn.Module):
    """Boxes that two layers refine. The second layer gets those of the first without their gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.embed = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        first = self.first(self.embed(x))
        return self.second(first.detach().sin()), first

    def last(self, x):
        return self.second(self.first(self.embed(x)).detach().sin())


def refinement_loss(model, x):
    boxes, first = model(x)
    return (boxes - x).square().mean() + (first - x).square().mean()


@pytest.mark.parametrize(("loss", "status"), [(refinement_loss, "warned"), (None, "failed")])
def test_detached_results_that_another_term_of_the_loss_trains(subjects, loss, status):
    spec = ModelSpec.of(Refined, inputs="vectors", width=6, forward=Refined.last, loss=loss)
    assert subjects.ask(spec, "gradient_exact").status == status


class WithLayerDrop(Layers):
    """Drops a layer of each training step at random."""

    def forward(self, ids):
        x, dropped = self.tokens(ids), int(torch.randint(len(self.layers), ()))
        for i, layer in enumerate(self.layers):
            x = x if self.training and i == dropped else layer(x)
        return self.head(x)


class Masked(nn.Module):
    """Patches, of which the mask replaces some."""

    def __init__(self):
        super().__init__()
        self.tokens, self.mask_token, self.head = (
            nn.Embedding(29, 16),
            nn.Parameter(torch.zeros(16)),
            nn.Linear(16, 29),
        )

    def forward(self, ids, hidden=None):
        x = self.tokens(ids)
        return self.head(x if hidden is None else torch.where(hidden[..., None], self.mask_token, x))


class Connected(nn.Module):
    """Uses the layer for images in each step, so that all ranks have the same gradients."""

    def __init__(self):
        super().__init__()
        self.tokens, self.images, self.head = nn.Embedding(29, 16), nn.Linear(8, 16), nn.Linear(16, 29)

    def forward(self, ids):
        return (
            self.head(self.tokens(ids))
            + 0 * self.images(torch.zeros(1, 8, dtype=self.head.weight.dtype)).sum()
        )


class Output(SimpleNamespace):
    """Logits and values."""


class WithValues(nn.Module):
    def __init__(self, keeps=False):
        super().__init__()
        self.tokens, self.value, self.head = nn.Embedding(29, 16), nn.Linear(16, 1), nn.Linear(16, 29)
        self.keeps = keeps

    def forward(self, ids):
        x = self.tokens(ids)
        if self.keeps:
            self.values = self.value(x)
            return self.head(x)
        return Output(logits=self.head(x), values=self.value(x))


class SelectedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(29, 16)
        self.heads = nn.ModuleDict({name: nn.Linear(16, 29) for name in ("one", "other")})

    def forward(self, ids):
        return {name: head(self.tokens(ids)) for name, head in self.heads.items()}["one"]


@pytest.mark.parametrize(
    ("build", "status"),
    [
        (lambda: WithLayerDrop(*(LayerOfTwoNorms(True) for _ in range(3))), "failed"),  # of the second norms
        (lambda: WithLayerDrop(*(ResidualLayer(16, 16) for _ in range(3))), "passed"),
        (Masked, "warned"),
        (Connected, "warned"),
        (WithValues, "passed"),
        (lambda: WithValues(keeps=True), "passed"),
        (SelectedHead, "warned"),
    ],
)
def test_parameters_that_healthy_models_do_not_use_in_each_step(subjects, build, status):
    result = subjects.ask(build, "gradient_flow")
    assert result.status == status, result
    assert status != "failed" or "norm2" in result.where

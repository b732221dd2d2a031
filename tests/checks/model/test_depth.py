"""Depth: growth per layer, against growth that is built in."""

import math

import pytest
import torch
from torch import nn

from stackwise.subject.spec import ModelSpec


class Tower(nn.Module):
    """Orthogonal layers times `gain`, so that activations and gradients change by gain ** L exactly."""

    def __init__(self, gain, n_layers, modules=True):
        super().__init__()
        self.tokens = nn.Embedding(29, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(n_layers))
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, gain)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 29)

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Parts(nn.Module):
    """The same, whose layers are never called themselves, only their parts."""

    def __init__(self, gain, n_layers):
        super().__init__()
        tower = Tower(gain, n_layers)
        self.tokens, self.norm, self.head = tower.tokens, tower.norm, tower.head
        self.layers = nn.ModuleList(nn.ModuleDict({"norm": nn.Identity(), "map": m}) for m in tower.layers)

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer["map"](layer["norm"](x))
        return self.head(self.norm(x))


@pytest.mark.parametrize("kind", [Tower, Parts])
@pytest.mark.parametrize(
    "gain, n_layers, status",
    [
        (1.0, 8, "passed"),
        (1.5, 8, "passed"),
        (1.9, 8, "warned"),
        (3.0, 8, "failed"),
        (0.5, 8, "warned"),
        (0.05, 8, "failed"),
        (20.0, 3, "warned"),
    ],
)
def test_growth(subjects, kind, gain, n_layers, status):
    result = subjects.ask(lambda: kind(gain, n_layers), "depth_activations")
    assert result.status == status
    assert result.value == pytest.approx(abs(math.log(gain)) * (n_layers - 1), abs=0.01)


def test_gradients(subjects):
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 3 * gradient

    class Grows(Tower):
        def forward(self, ids):
            x = self.tokens(ids)
            for layer in self.layers:
                x = Backward.apply(layer(x))
            return self.head(self.norm(x))

    assert subjects.ask(lambda: Grows(1.0, 8), "depth_activations").status == "passed"
    result = subjects.ask(lambda: Grows(1.0, 8), "depth_gradients")
    assert result.status == "failed"
    # The last layer gives its output before the gradient passes through the function.
    assert result.value == pytest.approx(6 * math.log(3), abs=0.01)


def test_not_finite(subjects):
    result = subjects.ask(lambda: Tower(1e20, 4), "depth_activations")
    assert result.status == "failed"
    assert result.where == "layers.1"
    assert "not finite" in result.meaning


@pytest.mark.parametrize("name", ["gru", "conv"])
def test_models_without_layers(subjects, name):
    for check in ("depth_activations", "depth_gradients"):
        result = subjects.ask(getattr(subjects, name), check)
        assert result.status == "not applicable"
        assert "at least two layers" in result.meaning


@pytest.mark.parametrize("name", ["tiny", "rack", "gpt2", "bert", "x_decoder", "encoder"])
def test_models_of_others(subjects, name):
    for check in ("depth_activations", "depth_gradients"):
        assert subjects.ask(getattr(subjects, name), check).status == "passed"


class Branches(nn.Module):
    """Only branches are in the list: what they read is a norm of the stream, and they are added to it."""

    def __init__(self, norms=True):
        super().__init__()
        self.tokens = nn.Embedding(29, 16)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(8))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(8)) if norms else None
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 29)

    def forward(self, ids):
        x = self.tokens(ids)
        for index, layer in enumerate(self.layers):
            y = x if self.norms is None else self.norms[index](x)
            x = x + 0.1 * layer(y)
        return self.head(self.norm(x))


@pytest.mark.parametrize("check", ["depth_activations", "depth_gradients"])
def test_what_a_branch_reads_is_not_the_stream(subjects, check):
    assert subjects.ask(Branches, check).status == "not applicable"


def test_a_stream_that_the_caller_sums_is_one(subjects):
    assert subjects.ask(lambda: Branches(norms=False), "depth_activations").status == "passed"


class Chain(nn.Module):
    """Layers with a function in between, which is what the next one reads."""

    def __init__(self, gain):
        super().__init__()
        self.tokens, self.head = nn.Embedding(29, 16), nn.Linear(16, 29)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(8))
        self.act = nn.LeakyReLU(0.5)
        for layer in self.layers:
            nn.init.orthogonal_(layer.weight, gain)

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = self.act(layer(x))
        return self.head(x)


@pytest.mark.parametrize("gain, status", [(1.2, "passed"), (6.0, "failed")])
def test_a_function_between_layers(subjects, gain, status):
    assert subjects.ask(lambda: Chain(gain), "depth_activations").status == status


class ClassToken(nn.Module):
    """The head reads only the first position, where the stream starts small.

    Gradients grow by `factor` from layer to layer.
    """

    def __init__(self, factor):
        super().__init__()
        self.factor, self.token = factor, nn.Parameter(torch.full((1, 1, 16), 1e-2))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True) for _ in range(6)
        )
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x):
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1)
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: self.factor * gradient)
        return self.head(self.norm(x[:, :1])).expand(-1, x.shape[1] - 1, -1)


@pytest.mark.parametrize(("factor", "status"), [(1.0, "passed"), (3.0, "failed")])
def test_gradient_of_a_class_token_is_judged_where_it_is_read(subjects, factor, status):
    spec = ModelSpec.of(lambda: ClassToken(factor), inputs="vectors", width=16, causal=False)

    assert subjects.ask(spec, "depth_gradients").status == status


class Attention(nn.Module):
    """Attention and feed-forward network, whose residual connections `mode` changes."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(1, 1, 16))
        self.qkv, self.out, self.up = (nn.Linear(16, n) for n in (48, 16, 32))
        self.down = nn.Linear(32, 16)

    def attention(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))

    def forward(self, x):
        if self.mode.startswith("post-norm"):
            x = self.norms[0](x * ("residual" in self.mode) + self.attention(x))
            return self.norms[1](x * ("residual" in self.mode) + self.down(self.up(x).relu())) * self.gain
        y = self.norms[0](x)
        x = y if self.mode == "norm before attention" else x
        y = self.attention(y)
        x = y if self.mode == "attention only" else x + y
        y = self.norms[1](x)
        x = y if self.mode == "norm before feed-forward" else x
        y = self.down(self.up(y).relu())
        if self.mode == "norm at the end":
            return self.norms[2](x + y)
        modes = {"feed-forward only": y, "twice": x + x + y, "gated": (x + y) * 0.5**0.5, "branch": x + y - x}
        return modes.get(self.mode, x + y)


class Residual(Tower):
    def __init__(self, mode):
        super().__init__(1.0, 3)
        self.mode = mode
        self.layers = nn.ModuleList(Attention(mode) for _ in range(3))

    def forward(self, ids):
        x = self.tokens(ids) * (self.mode != "starts at 0")
        for layer in self.layers:
            x = layer(x) if self.mode != "branch" else x + layer(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("mode", "factor"),
    [
        ("pre-norm", None),
        ("post-norm, residual", None),
        ("gated", None),
        ("starts at 0", None),
        ("branch", None),
        ("post-norm", 0),
        ("attention only", 0),
        ("feed-forward only", 0),
        ("twice", 2),
    ],
)
def test_the_stream_passes_layers_whose_weights_are_0(subjects, mode, factor):
    result = subjects.ask(lambda: Residual(mode), "residual_path")
    assert result.status == ("passed" if factor is None else "warned"), result
    assert result.value == (None if factor is None else pytest.approx(factor))


@pytest.mark.parametrize(
    ("mode", "where"),
    [
        ("pre-norm", None),
        ("post-norm, residual", None),
        ("norm at the end", None),
        ("norm before attention", "layers.*.norms.0"),
        ("norm before feed-forward", "layers.*.norms.1"),
    ],
)
def test_norms_on_some_skip_connections_are_a_warning(subjects, mode, where):
    result = subjects.ask(lambda: Residual(mode), "residual_norms")
    assert (result.status, result.where) == (("warned", where) if where else ("passed", "")), result


@pytest.mark.parametrize("build", [lambda: Tower(1.0, 4), lambda: nn.LSTM(16, 16, 3)])
def test_stream_of_layers_that_are_no_blocks(subjects, build):
    vectors = {} if isinstance(build(), Tower) else {"inputs": "vectors", "width": 16}
    assert subjects.ask(ModelSpec.of(build, **vectors), "residual_path").status == "not applicable"


def test_layers_that_return_the_residual_stream_beside_their_result(subjects):
    """As mamba-ssm does: the norm of the next layer adds both."""

    class Fused(Attention):
        def forward(self, x, residual):
            residual = x if residual is None else x + residual
            return self.attention(self.norms[0](residual)) + self.down(self.up(x).relu()), residual

    class Pairs(Residual):
        def __init__(self):
            super().__init__("pre-norm")
            self.layers = nn.ModuleList(Fused("pre-norm") for _ in range(3))

        def forward(self, ids):
            x, residual = self.tokens(ids), None
            for layer in self.layers:
                x, residual = layer(x, residual)
            return self.head(self.norm(x + residual))

    assert subjects.ask(Pairs, "residual_path").status in ("passed", "not applicable")


def test_layers_of_two_widths_whose_caller_adds(subjects):
    """All linear layers have one name pattern, and the stream does not run through them."""

    class Perceptrons(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)
            )

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = x + block(x)
            return self.last(x)

    for check in ("depth_activations", "depth_gradients", "residual_path"):
        assert subjects.ask(Perceptrons, check).status in ("passed", "not applicable")

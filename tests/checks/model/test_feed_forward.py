"""Feed-forward: products that one matrix could replace are found."""

import pytest
import torch
from torch import nn

from stackwise.subject.spec import ModelSpec


class Perceptrons(nn.Module):
    """Residual layers of two products: 16 -> `hidden` -> 16. The mode says where the activation is."""

    def __init__(self, mode="between", hidden=32):
        super().__init__()
        self.mode = mode
        self.tokens, self.head = nn.Embedding(29, 16), nn.Linear(16, 29)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(16, hidden), "down": nn.Linear(hidden, 16)}) for _ in range(2)
        )
        self.gain = nn.Parameter(torch.ones(hidden))

    def layer(self, x, up, down):
        match self.mode:
            case "between":
                return down(up(x).relu())
            case "before":
                return down(up(x.relu()))
            case "after":
                return down(up(x)).relu()
            case "scaled":  # dropout, a gain and a factor are no nonlinear functions
                return down(nn.functional.dropout(up(x) * self.gain / 2, 0.1, self.training))
            case "gated":
                return down(up(x) * up(x))
        raise AssertionError(self.mode)

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + self.layer(x, layer["up"], layer["down"])
        return self.head(x)


@pytest.mark.parametrize("mode", ["before", "after", "scaled"])
def test_products_without_an_activation_between_fail(subjects, mode):
    result = subjects.ask(lambda: Perceptrons(mode), "product_separation")
    assert result.status == "failed"
    assert result.where == "layers.0.up.weight and layers.0.down.weight"
    assert "16 -> 32 -> 16" in result.meaning


@pytest.mark.parametrize("mode", ["between", "gated"])
def test_products_with_a_nonlinear_function_pass(subjects, mode):
    assert subjects.ask(lambda: Perceptrons(mode), "product_separation").status == "passed"


class WithLowRank(Perceptrons):
    """Adds a product whose rank is larger than the width of a small model."""

    names = ("left", "right")

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.update({self.names[0]: nn.Linear(16, 32), self.names[1]: nn.Linear(32, 16)})

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            low_rank = layer[self.names[1]](layer[self.names[0]](x))
            x = x + layer["down"](layer["up"](x).relu()) + low_rank
        return self.head(x)


class Adapted(WithLowRank):
    names = ("lora_A", "lora_B")


def test_low_rank_product_beside_a_feed_forward_network_is_a_warning(subjects):
    result = subjects.ask(WithLowRank, "product_separation")
    assert (result.status, result.where) == ("warned", "layers.0.left.weight and layers.0.right.weight")


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.up, self.head = nn.Embedding(29, 8), nn.Linear(8, 64), nn.Linear(16, 29)
        self.layer = nn.GRU(64, 16, batch_first=True)

    def forward(self, ids):
        return self.head(self.layer(self.up(self.tokens(ids)))[0])


class HeadOfLowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.up, self.head = nn.Embedding(29, 16), nn.Linear(16, 64), nn.Linear(64, 32)

    def forward(self, ids):
        return self.head(self.up(self.tokens(ids)))[..., :29]


@pytest.mark.parametrize("build", [Adapted, Recurrent, HeadOfLowRank])
def test_products_of_adapters_recurrence_and_heads_pass(subjects, build):
    assert subjects.ask(build, "product_separation").status == "passed"


def test_narrow_product_is_a_low_rank_matrix(subjects):
    assert subjects.ask(lambda: Perceptrons("before", hidden=8), "product_separation").status == "passed"


def test_product_that_others_read_is_no_part_of_a_pair(subjects):
    """The projection of vectors is the residual stream, and a narrow product reads it."""

    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.gate, self.head = nn.Linear(8, 32), nn.Linear(32, 4), nn.Linear(36, 8)

        def forward(self, x):
            x = self.project(x)
            return self.head(torch.cat((x, self.gate(x)), dim=-1).tanh())

    spec = ModelSpec.of(Stream, inputs="vectors", width=8)
    assert subjects.ask(spec, "product_separation").status == "passed"


def test_model_without_products_is_not_applicable(subjects):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(29, 29)

        def forward(self, ids):
            return self.table(ids)

    assert subjects.ask(Table, "product_separation").status == "not applicable"

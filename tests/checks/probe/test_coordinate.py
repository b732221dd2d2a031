"""Coordinates: slopes that are known in closed form, and what is seen of a model."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stackwise.checks.probe.coordinate import (
    Coordinates,
    Training,
    coordinates_of,
    first_of,
    slopes_of,
    worst_of,
)

WIDTHS = (1, 2, 4, 8)


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x


class Linear(nn.Module):
    """y = W x of n ones, where every weight is n ** -power; a readout that means over y."""

    def __init__(self, n, power):
        super().__init__()
        self.layer, self.twice = nn.Linear(n, n, bias=False), Twice()
        self.head = nn.Linear(n, 3, bias=False)
        nn.init.constant_(self.layer.weight, n**-power)
        nn.init.constant_(self.head.weight, 1 / n)

    def forward(self, x):
        return self.head(self.twice(self.layer(x)))


def linear(width, power, rate):
    """Trained by the sign of its gradient, at 1e-3 * n ** rate: each step moves each y by that, n times."""
    n = 16 * width
    model = Linear(n, power).double()
    x = torch.ones(2, n, dtype=torch.float64)

    def update():
        (gradient,) = torch.autograd.grad(model.layer(x).sum(), model.layer.weight)
        with torch.no_grad():
            model.layer.weight += 1e-3 * n**rate * gradient.sign()

    return Training(model, lambda: model(x), update)


def slopes(make, steps=3, seeds=1):
    return slopes_of(WIDTHS, [[coordinates_of(make(width), steps) for _ in range(seeds)] for width in WIDTHS])


def by_key(slopes):
    return {(slope.module, slope.kind, slope.step): slope for slope in slopes}


class TestClosedForm:
    @pytest.mark.parametrize("power, rate", [(1, -1), (1, 0), (0.5, -1), (0.5, -0.5), (2, -1)])
    def test_slopes(self, power, rate):
        found = by_key(slopes(lambda width: linear(width, power, rate)))
        for module in ("layer", "twice", ""):
            assert found[module, "size", 0].value == pytest.approx(1 - power, abs=1e-6)
            for step in (1, 2, 3):
                assert found[module, "change", step].value == pytest.approx(1 + rate, abs=1e-6)

    def test_sizes_and_changes(self):
        seen = coordinates_of(linear(2, 1, -1), steps=3)
        assert seen.sizes["layer"] == pytest.approx([1.0, 1.001, 1.002, 1.003])
        assert seen.sizes["twice"] == pytest.approx([2.0, 2.002, 2.004, 2.006])
        assert seen.changes["layer"] == pytest.approx([0.0, 0.001, 0.002, 0.003])
        assert seen.changes[""] == pytest.approx([0.0, 0.002, 0.004, 0.006])

    def test_the_right_one_has_no_finding(self):
        found = slopes(lambda width: linear(width, 1, -1))
        assert worst_of(found).distance < 1e-6
        assert first_of(found) is None

    def test_the_learning_rate_that_is_not_divided(self):
        found = slopes(lambda width: linear(width, 1, 0))
        assert (worst_of(found).kind, worst_of(found).distance) == ("change", pytest.approx(1.0))
        first = first_of(found)
        assert (first.module, first.kind, first.step) == ("layer", "change", 1)

    def test_a_multiplier_before_the_readout(self):
        """`twice` is what the head reads; at 1 / n it is where muP's multiplier may stand, `layer` is not."""
        found = by_key(slopes(lambda width: linear(width, 2, -2)))
        assert (found["twice", "size", 0].expected, found["layer", "size", 0].expected) == (-1.0, 0.0)
        assert found["twice", "change", 1].distance == pytest.approx(0.0, abs=1e-6)
        assert found["layer", "change", 1].distance == pytest.approx(1.0)
        # The multiplier alone, without its learning rate, is a finding.
        assert by_key(slopes(lambda width: linear(width, 2, -1)))["twice", "change", 1].distance == (
            pytest.approx(1.0)
        )


def seen(sizes, changes=None, read=()):
    changes = changes or {name: (0.0,) * len(each) for name, each in sizes.items()}
    return Coordinates(sizes, changes, frozenset(read))


class TestSlopes:
    def test_mean_and_standard_error_over_seeds(self):
        found = [[seen({"a": (width**power,)}) for power in (0.1, 0.3, 0.8)] for width in WIDTHS]
        (slope,) = slopes_of(WIDTHS, found)
        assert slope.value == pytest.approx(0.4)
        # Standard deviation of 0.1, 0.3, 0.8 is sqrt(0.13), by hand.
        assert slope.standard_error == pytest.approx(math.sqrt(0.13 / 3))
        assert slope.sizes == pytest.approx([width**0.4 for width in WIDTHS])

    def test_least_squares(self):
        # Over log2 widths 0, 1, 2, 3 the log2 sizes 0, 1, 0, 1: slope (-1.5*0 - 0.5*1 + 0.5*0 + 1.5*1) / 5.
        (slope,) = slopes_of(WIDTHS, [[seen({"a": (size,)})] for size in (1, 2, 1, 2)])
        assert slope.value == pytest.approx(0.2)
        assert slope.standard_error is None

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_what_is_not_finite_is_the_worst(self, bad):
        sizes = [{"a": (1.0,), "b": (1.0 if width < 8 else bad,)} for width in WIDTHS]
        found = slopes_of(WIDTHS, [[seen(each), seen(each)] for each in sizes])
        worst = worst_of(found)
        assert (worst.module, worst.value, worst.standard_error) == ("b", math.inf, None)
        assert first_of(found) is worst

    def test_what_is_zero_or_not_everywhere_is_left_out(self):
        sizes = [{"zero": (0.0,), "a": (1.0,)} | ({"b": (1.0,)} if width > 1 else {}) for width in WIDTHS]
        found = slopes_of(WIDTHS, [[seen(each)] for each in sizes])
        assert [slope.module for slope in found] == ["a"]

    @pytest.mark.parametrize("name", ["", "attention: scores"])
    def test_the_output_and_scores_may_be_smaller(self, name):
        falling, rising = (
            slopes_of(WIDTHS, [[seen({name: (width**power,)})] for width in WIDTHS])[0]
            for power in (-0.5, 0.5)
        )
        assert (falling.distance, rising.distance) == (0.0, pytest.approx(0.5))

    def test_later_sizes_are_not_judged(self):
        found = slopes_of(WIDTHS, [[seen({"a": (1.0, width)}, {"a": (0.0, 1.0)})] for width in WIDTHS])
        assert [(slope.what, slope.judged) for slope in found] == [
            ("size at the start", True),
            ("size after 1 step", False),
            ("change after 1 step", True),
        ]
        assert worst_of(found).distance == 0.0

    def test_the_first_is_by_step_and_then_by_module(self):
        changes = {"late": (0.0, "w", "w"), "early": (0.0, "w", "w")}
        found = []
        for width in WIDTHS:
            of_width = {name: tuple(width if c == "w" else c for c in row) for name, row in changes.items()}
            sizes = {"late": (1.0, 1.0, 1.0), "early": (1.0, 1.0, 1.0)}
            found.append([seen(sizes, of_width)])
        assert [(s.module, s.step) for s in [first_of(slopes_of(WIDTHS, found))]] == [("late", 1)]

    def test_nothing_is_judged(self):
        assert worst_of(()) is None and first_of(()) is None


class Attends(nn.Module):
    """One head of causal attention; by hand, or by torch's fused function."""

    def __init__(self, fused=False, hidden=-math.inf):
        super().__init__()
        self.qkv, self.dropout, self.fused, self.hidden = nn.Linear(4, 12), nn.Dropout(0.5), fused, hidden

    def forward(self, x):
        q, k, v = self.dropout(self.qkv(x))[:, None].chunk(3, dim=-1)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        scores = (q @ k.transpose(-2, -1) / 2).masked_fill(self.above(x), self.hidden)
        return (scores.softmax(-1) @ v)[:, 0]

    def above(self, x):
        return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention, self.rest = Attends(**options), nn.Sequential(nn.Linear(4, 4), nn.Identity())

    def forward(self, x):
        return self.rest(self.attention(x))


def still(model, x):
    return Training(model, torch.no_grad()(lambda: model(x)), lambda: None)


class TestSeen:
    @pytest.mark.parametrize("options", [{}, {"fused": True}, {"hidden": -1e9}], ids=str)
    def test_scores_of_attention(self, options):
        torch.manual_seed(0)
        model, x = Model(**options).eval(), torch.randn(2, 5, 4)
        found = coordinates_of(still(model, x), 1)
        q, k, _ = model.attention.qkv(x).detach().double().chunk(3, dim=-1)
        by_hand = (torch.einsum("btd,bsd->bts", q, k) / 2).tril()
        assert found.sizes["attention: scores"] == pytest.approx([by_hand.abs().mean().item()] * 2)
        assert found.changes["attention: scores"] == (0.0, 0.0)

    def test_what_only_hands_on_is_left_out(self):
        """Dropout in eval mode, Identity, and what contains the module that makes the output."""
        found = coordinates_of(still(Model().eval(), torch.randn(2, 5, 4)), 1)
        assert list(found.sizes) == ["attention.qkv", "attention: scores", "attention", ""]
        assert found.read == {"attention"}

    def test_hooks_are_removed(self):
        model = Model().eval()
        coordinates_of(still(model, torch.randn(2, 5, 4)), 1)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    def test_a_mask_of_booleans_and_a_router_are_no_scores(self):
        class Router(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate = nn.Linear(4, 3)

            def forward(self, x):
                return self.gate(x).softmax(-1) + 1

        found = coordinates_of(still(Router().eval(), torch.randn(2, 5, 4)), 1)
        assert list(found.sizes) == ["gate", ""]

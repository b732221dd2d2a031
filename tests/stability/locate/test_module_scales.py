"""What explodes is named by what it is beside sound steps, not by what it is."""

import math

import pytest
import torch
from torch import nn

from stackwise.stability.locate import ModuleScales, locate


def chain(width=8, depth=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def step_of(model, x, factor=1.0):
    def run():
        (model(x).square().mean() * factor).backward()

    return run


def rms(tensor):
    return tensor.detach().double().square().mean().sqrt().item()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class LossOfOneFunction(nn.Module):
    """The last node of the graph belongs to an autograd.Function, as in a compiled model with its loss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return Doubled.apply(self.linear(x).square().mean())


def test_graph_that_ends_with_an_autograd_function():
    model = LossOfOneFunction()
    scales = ModuleScales.observe(model, lambda: model(torch.randn(5, 8)).backward())
    assert scales.calls == {("linear", 1), ("(outside the submodules)", 1)}
    assert scales.sizes["weights", "linear", 1, 0] > 0


def test_sizes_are_root_mean_squares():
    model = chain(depth=2)
    x = torch.randn(5, 8)
    scales = ModuleScales.observe(model, step_of(model, x))
    hidden = model[0](x)
    hidden.retain_grad()
    y = model[1](hidden)
    y.retain_grad()
    loss = y.square().mean()
    model.zero_grad()
    loss.backward()
    expected = {
        ("input", "0", 1, 0): rms(x),
        ("output", "0", 1, 0): rms(hidden),
        ("input", "1", 1, 0): rms(hidden),
        ("output", "1", 1, 0): rms(y),
        ("incoming", "1", 1, 0): rms(y.grad),
        ("outgoing", "1", 1, 0): rms(hidden.grad),
        ("incoming", "0", 1, 0): rms(hidden.grad),
        ("weights", "0", 1, 0): rms(torch.cat([p.grad.flatten() for p in model[0].parameters()])),
        ("weights", "(outside the submodules)", 1, 0): rms(
            torch.cat([p.grad.flatten() for p in model.parameters()])
        ),
        ("parameter", "1.weight", 0, 0): rms(model[1].weight),
        ("loss", "", 0, 0): loss.item(),
    }
    for key, value in expected.items():
        assert scales.sizes[key] == pytest.approx(value, rel=1e-5), key
    assert ("outgoing", "0", 1, 0) not in scales.sizes  # its input is data
    assert scales.calls == {("0", 1), ("1", 1), ("(outside the submodules)", 1)}
    assert not scales.expected


def test_the_largest_of_several_steps():
    model = chain(depth=1)
    small, large = torch.ones(2, 8), torch.full((2, 8), 3.0)
    scales = ModuleScales.observe(model, step_of(model, large), step_of(model, small))
    assert scales.sizes["input", "0", 1, 0] == 3.0
    with pytest.raises(ValueError, match="runs: got"):
        ModuleScales.observe(model)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("factor", [10.0, 1e6])
def test_a_weight_that_has_grown(place, factor):
    model = chain()
    run = step_of(model, torch.randn(5, 8))
    scales = ModuleScales.observe(model, run)
    with torch.no_grad():
        model[place].weight *= factor
    location = locate(model, run, scales=scales)
    assert (location.module, location.direction) == (f"{place}.weight", "parameter")
    assert location.value == pytest.approx(factor)
    assert location.kind == "exploding"
    assert locate(model, run) is None


def test_an_input_that_has_grown():
    model = chain()
    x = torch.randn(5, 8)
    scales = ModuleScales.observe(model, step_of(model, x))
    location = locate(model, step_of(model, x * 50), scales=scales)
    assert (location.module, location.direction, location.value) == (
        "(outside the submodules)",
        "input",
        pytest.approx(50),
    )


def test_a_loss_that_has_grown():
    model = chain()
    x = torch.randn(5, 8)
    scales = ModuleScales.observe(model, step_of(model, x))
    location = locate(model, step_of(model, x, factor=100.0), scales=scales)
    assert (location.direction, location.value) == ("loss", pytest.approx(100, rel=1e-3))
    # Its gradient alone.
    location = locate(model, lambda: model(x).square().mean().backward(torch.tensor(30.0)), scales=scales)
    assert (location.direction, location.value) == ("loss", pytest.approx(30, rel=1e-3))


def test_growth_within_the_factor_is_none():
    model = chain()
    x = torch.randn(5, 8)
    scales = ModuleScales.observe(model, step_of(model, x))
    model[1].register_forward_hook(lambda _, __, output: output * 5.0)
    run = step_of(model, x)
    assert str(locate(model, run, scales=scales)).startswith("1 (forward, ")
    assert locate(model, run, scales=scales, factor=1e4) is None
    for factor in (1.0, 0.5, math.nan):
        with pytest.raises(ValueError, match="factor: got"):
            locate(model, run, scales=scales, factor=factor)


def test_what_grows_bit_by_bit_is_named_where_it_passes_the_factor():
    model = chain()
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.eye(8))
            layer.bias.zero_()
    x = torch.randn(5, 8)
    scales = ModuleScales.observe(model, step_of(model, x))
    for layer in model:
        layer.register_forward_hook(lambda _, __, output: output * 2.5)
    location = locate(model, step_of(model, x), scales=scales)
    assert (location.module, location.value) == ("(outside the submodules)", pytest.approx(2.5**4))
    assert location.direction == "forward"


def test_nothing_is_said_of_what_was_never_seen():
    model = chain()
    scales = ModuleScales.observe(model, lambda: model[0](torch.ones(1, 8)).sum().backward())
    assert scales.ratio(("output", "3", 1, 0), 5.0) is None
    assert scales.ratio(("output", "0", 1, 0), None) is None
    model[3].register_forward_hook(lambda _, __, output: output * 1e3)
    assert locate(model, lambda: model[1:](torch.ones(1, 8)), scales=scales) is None

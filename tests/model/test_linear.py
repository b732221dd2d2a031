"""Linear: the same product, whichever way it is computed."""

import pytest
import torch
from torch import nn

from stackwise.model.linear import Linear


def linear_of(n=7, k=5, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    layer = Linear(k, n, bias=bias)
    return layer.to(dtype).requires_grad_(False)


@pytest.fixture
def compiling(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_a_single_vector(compiling, n, dtype, bias):
    layer = linear_of(n, dtype=dtype, bias=bias)
    x = torch.randn(1, 1, 5)
    with torch.no_grad():
        y = layer(x)
    expected = layer.weight.double() @ x.double().flatten()
    if bias:
        expected = expected + layer.bias.double()
    assert y.shape == (1, 1, n) and y.dtype == torch.float32
    torch.testing.assert_close(y.flatten().double(), expected, rtol=1e-5, atol=1e-6)


def test_rows_of_integers_times_their_scales():
    layer = linear_of(bias=False)
    q = torch.randint(-127, 128, (7, 5), dtype=torch.int8)
    scale, x = torch.rand(7), torch.randn(1, 5)
    expected = (q.double() * scale.double()[:, None]) @ x.double().flatten()
    torch.testing.assert_close(layer.single(x, q, scale).flatten().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "x, why",
    [
        (torch.zeros(2, 5), "two vectors"),
        (torch.zeros(1, 5, dtype=torch.float64), "another dtype"),
        (torch.zeros(1, 5, device="meta"), "another device"),
    ],
)
def test_what_is_no_single_float32_vector_on_the_cpu(compiling, x, why):
    with torch.no_grad():
        assert not linear_of().is_single(x), why


def test_neither_gradients_nor_plain_code_go_another_way(compiling, monkeypatch):
    x = torch.zeros(1, 5)
    assert not linear_of().is_single(x)  # gradients are on
    with torch.no_grad():
        assert linear_of().is_single(x)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
        assert not linear_of().is_single(x)


def test_weights_are_those_of_nn_linear():
    ours, theirs = linear_of(), nn.Linear(5, 7)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 5)
    assert ours(x).equal(theirs(x))

"""What is counted in a call, against products worked out by hand; and what is said not to be."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from stackwise.benchmark.flops.counted import count_flops, operation_flops

B, H, T, S, D, V = 2, 4, 5, 7, 8, 8


def heads(*shape):
    return torch.randn(*shape, requires_grad=True)


def attention(kv_heads=H, causal=False):
    q, k, v = heads(B, H, T, D), heads(B, kv_heads, S, D), heads(B, kv_heads, S, V)
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=kv_heads != H)


@pytest.mark.parametrize("kv_heads", [H, 2])
def test_attention_on_the_cpu(kv_heads):
    """Torch's own counter sees nothing of it (pytorch#195460)."""
    call = attention(kv_heads)
    counted = count_flops(call)
    assert counted.total == 2 * B * H * T * S * (D + V)
    assert list(counted.by_operation) == ["aten._scaled_dot_product_flash_attention_for_cpu"]
    backward = count_flops(lambda: call().sum().backward())
    # Two products forward; backward the scores again and two derivatives of each.
    assert backward.total == 2 * B * H * T * S * ((D + V) + (3 * D + 2 * V))


def test_torch_s_own_counter_misses_it():
    call = attention()
    with FlopCounterMode(display=False) as counter:
        call()
    missed = count_flops(call).total - counter.get_total_flops()
    assert missed in (0, 2 * B * H * T * S * (D + V)), "0 once torch counts it"


def test_the_math_kernel_is_products():
    call = attention()
    with sdpa_kernel(SDPBackend.MATH):
        counted = count_flops(lambda: call().sum().backward())
    assert counted.total == 3 * 2 * B * H * T * S * (D + V)


def test_causality_is_not_discounted():
    assert count_flops(attention(causal=True)).total == count_flops(attention()).total


@pytest.mark.parametrize(
    "call, flops",
    [
        (lambda: torch.randn(3, 4) @ torch.randn(4), 2 * 3 * 4),
        (lambda: torch.addmv(torch.randn(3), torch.randn(3, 4), torch.randn(4)), 2 * 3 * 4),
        (lambda: torch.randn(6) @ torch.randn(6), 2 * 6),
        (lambda: torch.randn(3, 4) @ torch.randn(4, 5), 2 * 3 * 4 * 5),
        (lambda: torch.einsum("bij,bjk->bik", torch.randn(2, 3, 4), torch.randn(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda: F.linear(torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)), 2 * 2 * 3 * 4 * 5),
        (lambda: F.conv1d(torch.randn(2, 3, 9), torch.randn(4, 3, 2)), 2 * 2 * 4 * 8 * 3 * 2),
        (
            lambda: torch.addbmm(torch.zeros(3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5)),
            2 * 2 * 3 * 4 * 5,
        ),
        (
            lambda: torch._addmm_activation(torch.zeros(5), torch.randn(3, 4), torch.randn(4, 5)),
            2 * 3 * 4 * 5,
        ),
        (lambda: torch.randn(3, 4) + torch.randn(4), 0),
    ],
    ids=["mv", "addmv", "dot", "mm", "einsum", "linear", "conv", "addbmm", "activation", "add"],
)
def test_products(call, flops):
    counted = count_flops(call)
    assert counted.total == flops
    assert counted.uncounted == ()
    assert sum(counted.by_operation.values()) == sum(counted.by_dtype.values()) == flops
    assert all(counted.by_operation.values())


def test_what_is_recomputed_counts_again():
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    x = torch.randn(3, 4, requires_grad=True)
    product = 2 * 3 * 4 * 4

    def again():
        checkpoint(layers, x, use_reentrant=False).sum().backward()

    assert count_flops(lambda: layers(x).sum().backward()).total == 2 * 3 * product
    # The result of the last product is not needed, and torch stops in front of it.
    assert count_flops(again).total == 2 * 3 * product + product


@pytest.mark.parametrize("retain_graph", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_recomputed_is_told_apart(reentrant, retain_graph):
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    x = torch.randn(3, 4, requires_grad=True)

    def again():
        checkpoint(layers, x, use_reentrant=reentrant).sum().backward(retain_graph=retain_graph)

    plain = count_flops(lambda: layers(x).sum().backward())
    counted = count_flops(again)
    assert plain.recomputed == 0
    assert counted.recomputed == counted.total - plain.total > 0
    assert counted.to_dict()["recomputed"] == counted.recomputed


def test_a_backward_pass_that_is_itself_differentiated_recomputes_nothing():
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))

    def penalty():
        x = torch.randn(3, 4, requires_grad=True) * 1  # under a counter of modules torch refuses a leaf
        (gradient,) = torch.autograd.grad(layers(x).sum(), x, create_graph=True)
        return gradient.pow(2).sum()

    product = 2 * 3 * 4 * 4
    first = count_flops(penalty)
    assert (first.total, first.recomputed) == (2 * 2 * product, 0)
    twice = count_flops(lambda: penalty().backward())
    assert twice.total > first.total
    assert twice.recomputed == 0


def test_beside_one_that_is_differentiated_recomputation_is_told_apart():
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))

    def step():
        x = torch.randn(3, 4, requires_grad=True) * 1
        torch.autograd.grad(layers(x).sum(), x, create_graph=True)
        checkpoint(layers, x, use_reentrant=True).sum().backward()

    assert count_flops(step).recomputed == 2 * (2 * 3 * 4 * 4)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
def test_a_convolution_backward(kind, groups):
    """A weight is multiplied once for each position of the output, or where transposed of the input."""
    layer, x = kind(6, 12, 3, stride=2, groups=groups, bias=False), heads(2, 6, 9)
    product = 2 * 2 * (4 if kind is nn.Conv1d else 9) * layer.weight.numel()
    assert count_flops(lambda: layer(x)).total == product
    step = count_flops(lambda: layer(x).sum().backward())
    assert step.total == sum(step.by_dtype.values()) == 3 * product
    without = x.detach()
    assert count_flops(lambda: layer(without).sum().backward()).total == 2 * product


def test_an_operation_of_others_is_named():
    @torch.library.custom_op("stackwise_test::product", mutates_args=())
    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y

    counted = count_flops(lambda: product(torch.randn(3, 3), torch.randn(3, 3)))
    assert counted.uncounted == ("stackwise_test.product",)
    assert counted.to_dict()["uncounted"] == ["stackwise_test.product"]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: nn.Bilinear(4, 5, 6)(torch.randn(2, 4), torch.randn(2, 5)), "_trilinear"),
        (lambda: torch.sparse.mm(torch.eye(8).to_sparse(), torch.randn(8, 4)), "_sparse_addmm"),
        (lambda: torch.cdist(torch.randn(50, 8), torch.randn(50, 8)), "_euclidean_dist"),
        (lambda: torch.cdist(torch.randn(5, 8), torch.randn(5, 8)), "_cdist_forward"),
        (lambda: torch.conv_tbc(torch.randn(9, 2, 4), torch.randn(3, 4, 5), torch.zeros(5)), "conv_tbc"),
        (lambda: torch.addr(torch.zeros(3, 4), torch.randn(3), torch.randn(4)), "addr"),
    ],
)
def test_what_multiplies_without_a_formula_is_named(call, name):
    counted = count_flops(call)
    assert (counted.total, counted.uncounted) == (0, (f"aten.{name}",))


def test_the_dtype_of_products_is_what_autocast_made_of_it():
    layer, x = nn.Linear(4, 5, bias=False), torch.randn(3, 4)

    def call():
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
        layer(x[:1])

    counted = count_flops(call)
    assert list(counted.by_dtype.items()) == [(torch.bfloat16, 2 * 3 * 4 * 5), (torch.float32, 2 * 4 * 5)]
    assert counted.to_dict()["by_dtype"] == {"bfloat16": 120, "float32": 40}


@torch.no_grad()
def test_a_layer_in_one_piece_is_named():
    """Torch's fast path for inference is one operation that no formula counts."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    counted = count_flops(lambda: layer(torch.randn(2, 3, 8)))
    assert counted.uncounted == ("aten._transformer_encoder_layer_fwd",)
    assert counted.total == 0


def test_what_is_compiled_is_counted_as_it_is_not():
    layer = nn.Linear(4, 5, bias=False)
    compiled = torch.compile(layer)
    x = torch.randn(3, 4)
    for _ in range(2):  # also once it is there
        counted = count_flops(lambda: compiled(x).sum().backward())
        assert counted.total == 2 * 2 * 3 * 4 * 5  # nothing asks for the gradient of the input
        assert counted.uncounted == ()


def test_one_operation():
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            seen.append(operation_flops(function, args, kwargs or {}, result))
            return result

    with Seen():
        torch.ones(3, 4) @ torch.ones(4, 5)
    assert sum(seen) == 2 * 3 * 4 * 5
    assert seen.count(0) == len(seen) - 1
    call = attention()
    seen.clear()
    with torch.no_grad(), Seen():
        call()
    assert sum(seen) == 2 * B * H * T * S * (D + V)


@pytest.mark.parametrize("create_graph", [False, True])
def test_the_gradient_of_an_input(create_graph):
    """As for a gradient penalty, whose own gradient is not asked for here."""
    layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    x = torch.randn(3, 4, requires_grad=True)

    def call():
        (gradient,) = torch.autograd.grad(layers(x).sum(), x, create_graph=create_graph)
        assert gradient.shape == x.shape

    assert count_flops(call).total == 2 * 2 * 3 * (4 * 8 + 8)


def test_an_error_ends_the_count():
    with pytest.raises(ZeroDivisionError):
        count_flops(lambda: 1 / 0)
    assert count_flops(lambda: torch.ones(2, 2) @ torch.ones(2, 2)).total == 16

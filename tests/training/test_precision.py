"""Precision: what is refused where, what is autocast, and what float8 touches."""

import copy
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from stackwise.model import create_simple_rack, quantize_stack
from stackwise.training.precision import (
    autocast,
    check_precision,
    check_weights,
    compute_dtype,
    float8_layers,
    frozen_precision,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PRECISIONS = ["fp32", "bf16", "bf16_weights", "fp16", "float8"]


def rack_of(**changes):
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 48, "n_heads": 4, "vocab_size": 64}
    return create_simple_rack(2, 1, **{**sizes, **changes})


def loss_of(rack, ids):
    return nn.functional.cross_entropy(rack(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def on_cuda(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


class TestRefused:
    @pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_weights"])
    def test_allowed_everywhere(self, precision):
        check_precision(precision, CPU)
        check_precision(precision, torch.device("meta"))

    @pytest.mark.parametrize("precision", ["fp16", "float8"])
    def test_on_the_cpu(self, precision):
        with pytest.raises(ValueError) as refusal:
            check_precision(precision, CPU)
        message = str(refusal.value)
        assert message.startswith(f"training.precision: got {precision!r}; it needs CUDA")
        assert message.endswith("; allowed on cpu: 'fp32', 'bf16', 'bf16_weights'")

    @pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
    def test_on_hardware_that_has_float8(self, monkeypatch, capability):
        on_cuda(monkeypatch, capability)
        check_precision("float8", CUDA)
        check_precision("fp16", CUDA)

    @pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6)])
    def test_on_hardware_without(self, monkeypatch, capability):
        on_cuda(monkeypatch, capability)
        check_precision("fp16", CUDA)
        allowed = "'fp32', 'bf16', 'bf16_weights', 'fp16'"
        with pytest.raises(ValueError, match=rf"8\.9, and this has \d\.\d; allowed on cuda: {allowed}$"):
            check_precision("float8", CUDA)

    def test_without_torchao(self, monkeypatch):
        on_cuda(monkeypatch, (9, 0))
        monkeypatch.setitem(sys.modules, "torchao", None)
        for raises in (lambda: check_precision("float8", CUDA), float8_layers(rack_of()).__enter__):
            with pytest.raises(ImportError, match=r"pip install 'stackwise\[quant\]'"):
                raises()

    @pytest.mark.parametrize("ask", [lambda p: check_precision(p, CPU), lambda p: autocast(p, CPU)])
    def test_unknown(self, ask):
        with pytest.raises(ValueError, match=r"training.precision: got 'fp64'; allowed: 'fp32', 'bf16'"):
            ask("fp64")


@pytest.mark.parametrize(
    "precision, of_product",
    [
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("bf16_weights", torch.float32),
        ("fp16", torch.float16),
        ("float8", torch.bfloat16),
    ],
)
def test_autocast(precision, of_product):
    x = torch.ones(2, 2)
    with autocast(precision, CPU):
        assert (x @ x).dtype == of_product
        # Casting weights is the optimizer's there.
        assert precision == "bf16_weights" or compute_dtype(precision) == of_product
    assert isinstance(autocast("fp32", CPU), nullcontext)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_that_are_narrow(precision, dtype):
    """What can be computed with: by autocast any that is frozen, and bfloat16 among bfloat16 weights."""
    rack = rack_of()
    check_weights(rack, precision)
    rack.get_stack(1).to(dtype).freeze()
    fits = precision in ("bf16", "fp16", "float8") or (precision, dtype) == ("bf16_weights", torch.bfloat16)
    message = rf"dtype of stacks\.1\..*: got {dtype}; allowed: torch\.float32.* frozen, with .*='{precision}'"
    with nullcontext() if fits else pytest.raises(ValueError, match=message):
        check_weights(rack, precision)
    rack.get_stack(1).unfreeze()
    with pytest.raises(ValueError, match=rf"dtype of stacks\.1\..*: got {dtype}; allowed: torch\.float32 of"):
        check_weights(rack, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_frozen_weights_are_float32_and_their_products_are_not(precision):
    with autocast(frozen_precision(precision), CPU):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == compute_dtype(precision)


class TestFloat8:
    """Emulated: rounded to float8, multiplied in float32."""

    def test_what_it_touches(self):
        rack = rack_of(tie_embeddings=False, d_ff=40)
        before = {name: (type(m), m) for name, m in rack.named_modules()}
        with float8_layers(rack, emulate=True) as names:
            converted = {name for name, m in rack.named_modules() if type(m) is not before[name][0]}
        # 40 is no multiple of 16: nothing of the feed-forward fits.
        attention = {f"stacks.{i}.blocks.0.attention.{name}" for i in (0, 1) for name in ("qkv", "out")}
        assert converted == attention == set(names)
        assert {name: (type(m), m) for name, m in rack.named_modules()} == before

    def test_training_goes_on_and_what_is_left_is_plain(self):
        rack = rack_of()
        twin = copy.deepcopy(rack)
        names, weights = list(rack.state_dict()), dict(rack.named_parameters())
        ids = torch.randint(64, (4, 13), generator=torch.Generator().manual_seed(0))
        losses = {}
        for name, model, around in [("fp32", twin, False), ("float8", rack, True)]:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            losses[name] = []
            with float8_layers(model, emulate=True) if around else nullcontext():
                for _ in range(15):
                    loss = loss_of(model, ids)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses[name].append(loss.item())
                assert list(model.state_dict()) == names
        assert losses["float8"][-1] < losses["float8"][0] - 1.0
        assert losses["float8"] == pytest.approx(losses["fp32"], rel=0.1)
        assert losses["float8"] != losses["fp32"]
        # The very parameters that an optimizer holds.
        assert all(p is weights[name] for name, p in rack.named_parameters())
        assert list(rack.state_dict()) == names
        assert {type(p) for p in rack.parameters()} == {nn.Parameter}
        assert {p.dtype for p in rack.parameters()} == {torch.float32}
        rack.load_state_dict(twin.state_dict())
        assert loss_of(rack, ids).equal(loss_of(twin, ids))

    def test_rounding_is_that_of_float8(self):
        """By hand: each operand scaled by its own largest number to that of e4m3, rounded, scaled back."""
        rack = rack_of()
        layer, x = rack.get_stack(0).get_block(0).attention.out, torch.randn(16, 32)

        def rounded(t):
            scale = torch.finfo(torch.float8_e4m3fn).max / t.abs().max()
            return (t * scale).to(torch.float8_e4m3fn).double() / scale.double()

        expected = rounded(x) @ rounded(layer.weight.detach()).T
        with float8_layers(rack, emulate=True):
            y = rack.get_stack(0).get_block(0).attention.out(x)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(y, layer(x), rtol=1e-3)

    def test_an_error_within_leaves_the_model_as_it_was(self):
        rack = rack_of()
        kinds = [type(m) for m in rack.modules()]
        with pytest.raises(KeyError), float8_layers(rack, emulate=True):
            raise KeyError
        assert [type(m) for m in rack.modules()] == kinds

    def test_quantised_layers_stay(self):
        rack = rack_of()
        quantize_stack(rack, 0, "int8")
        with float8_layers(rack, emulate=True) as names:
            assert names and all(name.startswith("stacks.1.") for name in names)

    @pytest.mark.parametrize(
        "model", [nn.Linear(16, 16), rack_of(d_model=24, d_ff=40)], ids=["no Block", "24"]
    )
    def test_nothing_to_convert(self, model):
        with pytest.raises(ValueError, match=r"got 'float8'; .* multiples of 16"), float8_layers(model):
            pass

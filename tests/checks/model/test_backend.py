"""Kernels of attention: branches on the one in use are found, sound attention passes."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


@pytest.fixture(scope="module")
def models(subjects):
    class Fused(subjects.TinyLM):
        def attend(self, layer, x):
            q, k, v = (self.split(y) for y in layer["qkv"](x).chunk(3, dim=-1))
            return layer["out"](self.fused(q, k, v).transpose(1, 2).flatten(2))

        def fused(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    class OtherScale(Fused):
        def fused(self, q, k, v):
            scale = 0.5 if torch.backends.cuda.flash_sdp_enabled() else None
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    return {name: value for name, value in locals().items() if isinstance(value, type)}


def test_another_scale(subjects, models):
    model = models["OtherScale"]().eval()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        plain = model(torch.arange(8)[None])
    assert not torch.allclose(plain, model(torch.arange(8)[None]), rtol=1e-2)
    result = subjects.ask(models["OtherScale"], "backend_gradients")
    assert result.status == "failed"
    assert result.value > result.limit


@pytest.mark.parametrize("name", ["rack", "dropout_rack", "llama", "gpt2", "bert"])
def test_sound(subjects, name):
    result = subjects.ask(getattr(subjects, name), "backend_gradients")
    assert result.status == "passed"
    assert result.value <= result.limit == 1e-4


def test_fused(subjects, models):
    assert subjects.ask(models["Fused"], "backend_gradients").status == "passed"


@pytest.mark.parametrize("name", ["tiny", "gru", "conv"])
def test_nothing_to_ask(subjects, name):
    result = subjects.ask(getattr(subjects, name), "backend_gradients")
    assert result.status == "not applicable"
    assert "scaled_dot_product_attention" in result.meaning

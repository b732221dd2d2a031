"""Attention backend: a model that depends on it fails, and correct models pass."""

import pytest
import torch
import torch.nn.functional as F

from tests.subjects import TinyLM, ask


class Fused(TinyLM):
    """Correct model that calls scaled_dot_product_attention."""

    def attend(self, layer, x):
        q, k, v = (self.split(y) for y in layer["qkv"](x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale())
        return layer["out"](y.transpose(1, 2).flatten(2))

    def scale(self):
        return None


class OtherScale(Fused):
    def scale(self):
        return 0.5 if torch.backends.cuda.flash_sdp_enabled() else None


def test_other_scale_of_one_backend_fails():
    result = ask(OtherScale, "backend_gradients")
    assert result.status == "failed"
    assert result.value > result.limit
    assert "the math backend" in result.meaning


@pytest.mark.parametrize("name", ["dropout_rack", "llama", "gpt2", "bert"])
def test_published_model_passes(subjects, name):
    result = ask(getattr(subjects, name), "backend_gradients")
    assert result.status == "passed"
    assert result.value <= result.limit


def test_model_with_fused_attention_passes():
    assert ask(Fused, "backend_gradients").status == "passed"


@pytest.mark.parametrize("name", ["tiny", "gru", "conv"])
def test_model_without_fused_attention_is_not_asked(subjects, name):
    result = ask(getattr(subjects, name), "backend_gradients")
    assert result.status == "not applicable"
    assert "scaled_dot_product_attention" in result.meaning

"""Encoder-decoders are checked as decoders, while the encoder reads a fixed text."""

import pytest
import torch
import torch.nn.functional as F
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from stackwise import ModelSpec, check_model


def tiny_t5():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=61, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, dropout_rate=0.1)
    )


def tiny_bart():
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in SIZES.items()}
    return BartForConditionalGeneration(BartConfig(vocab_size=61, d_model=16, **sizes))


SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}


@pytest.fixture(scope="module", params=[tiny_t5, tiny_bart])
def spec(request):
    return ModelSpec.of(request.param)


def test_capabilities_are_those_of_the_decoder(spec):
    assert (spec.causal, spec.width) == (True, 61)
    assert spec.masked and spec.decode and spec.labelled_loss
    assert "fixed text" in spec.notes


def test_labels_are_the_next_tokens(spec):
    model, ids = spec.create(), spec.batch(2, 8)
    expected = F.cross_entropy(spec.logits(model.eval(), ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert torch.allclose(spec.labelled_loss(model, ids, ids), expected)


def test_declared_forward_is_used():
    def forward(model, ids):
        return model(input_ids=ids, decoder_input_ids=ids)

    declared = ModelSpec.of(tiny_t5, forward=forward, inputs="tokens", width=61)
    assert isinstance(declared.create(), T5ForConditionalGeneration)


def test_decoder_that_reads_ahead_fails():
    def leaky():
        model = tiny_t5()
        model.lm_head.register_forward_pre_hook(lambda _, args: args[0] + args[0].mean(1, keepdim=True))
        return model

    [sound] = check_model(tiny_t5, checks=["causality"])
    [result] = check_model(leaky, checks=["causality"])
    assert (sound.status, result.status) == ("passed", "failed")

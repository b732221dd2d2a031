"""Encoder-decoders are checked as decoders, while the encoder reads a fixed text."""

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    T5Config,
    T5ForConditionalGeneration,
)

from stackwise import ModelSpec, check_model
from stackwise.subject.encoder_decoder import Decoder


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


def two_berts():
    """Return the configuration of an encoder and a decoder with different vocabularies."""
    part = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        BertConfig(**part, intermediate_size=32),
        BertConfig(
            **part | {"vocab_size": 61}, intermediate_size=32, is_decoder=True, add_cross_attention=True
        ),
    )
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return config


def test_size_of_the_vocabulary_is_that_of_the_decoder():
    assert ModelSpec.of(lambda: EncoderDecoderModel(two_berts())).width == 61


def test_declared_facts_are_those_of_the_whole_model():
    spec = ModelSpec.of(tiny_t5, reference=tiny_t5, frozen=("encoder.",))
    assert {name for name, _ in spec.create().named_parameters() if name.startswith(spec.frozen)}
    [result] = check_model(spec, checks=["reference_output"])
    assert result.status == "passed"


def test_declared_loss_gets_the_whole_model():
    def loss(model, ids):
        return model(input_ids=ids, decoder_input_ids=ids, labels=ids).loss

    spec = ModelSpec.of(tiny_t5, loss=loss)
    assert spec.loss_of(spec.create(), spec.batch(2, 8)).isfinite()


def test_declared_forward_is_used():
    def forward(model, ids):
        return model(input_ids=ids, decoder_input_ids=ids)

    declared = ModelSpec.of(tiny_t5, forward=forward, inputs="tokens", width=61)
    assert isinstance(declared.create(), T5ForConditionalGeneration)


def test_embedding_is_that_of_the_decoder():
    model = Decoder(EncoderDecoderModel(two_berts()))
    assert model.get_input_embeddings() is model.model.decoder.get_input_embeddings()


def test_decoder_that_reads_ahead_fails():
    def leaky():
        model = tiny_t5()
        model.lm_head.register_forward_pre_hook(lambda _, args: args[0] + args[0].mean(1, keepdim=True))
        return model

    [sound] = check_model(tiny_t5, checks=["causality"])
    [result] = check_model(leaky, checks=["causality"])
    assert (sound.status, result.status) == ("passed", "failed")

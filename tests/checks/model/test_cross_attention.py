"""Cross-attention: padding of the encoder that the mask hides must not change the output."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn


class Decoder(nn.Module):
    """One layer of cross-attention over the states of an encoder, without self-attention."""

    uses_mask = True

    def __init__(self, width=16, encoder_width=24):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, width), nn.Linear(width, 31)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(encoder_width, 2 * width)

    def forward(self, input_ids, encoder_hidden_states=None, encoder_attention_mask=None):
        x = self.embedding(input_ids)
        if encoder_hidden_states is not None:
            k, v = self.kv(encoder_hidden_states).chunk(2, dim=-1)
            mask = None if encoder_attention_mask is None else self.visible(encoder_attention_mask)
            x = x + F.scaled_dot_product_attention(self.q(x), k, v, attn_mask=mask)
        return self.head(x)

    def visible(self, mask):
        return mask.bool()[:, None]


class MaskDiscarded(Decoder):
    def visible(self, mask):
        return None


class WithoutLayers(Decoder):
    """Has the arguments, and no layers for them."""

    def forward(self, input_ids, encoder_hidden_states=None, encoder_attention_mask=None):
        if encoder_hidden_states is not None:
            return self.cross_attention(encoder_hidden_states)
        return super().forward(input_ids)


class MaskSwapped(Decoder):
    def visible(self, mask):
        return ~super().visible(mask)


class OnlyInBatches(Decoder):
    """A mask of ones switches off the scale of the states."""

    def forward(self, input_ids, encoder_hidden_states=None, encoder_attention_mask=None):
        if encoder_attention_mask is not None:
            encoder_hidden_states = encoder_hidden_states * 0.5
        return super().forward(input_ids, encoder_hidden_states, encoder_attention_mask)


@pytest.mark.parametrize("build", [MaskDiscarded, MaskSwapped, OnlyInBatches])
def test_wrong_mask_of_the_encoder_is_found(subjects, build):
    assert subjects.ask(build, "encoder_padding").status == "failed"


def bert():
    config = transformers.BertConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        is_decoder=True,
        add_cross_attention=True,
    )
    return transformers.BertLMHeadModel(config)


@pytest.mark.parametrize("build", [Decoder, bert])
def test_sound_cross_attention_passes(subjects, build):
    result = subjects.ask(build, "encoder_padding")
    assert result.status == "passed"
    assert result.value <= result.limit


class StatesIgnored(Decoder):
    def forward(self, input_ids, encoder_hidden_states=None, encoder_attention_mask=None):
        return super().forward(input_ids)


@pytest.mark.parametrize("build", [StatesIgnored, WithoutLayers, lambda: nn.Embedding(31, 8)])
def test_model_without_cross_attention_is_not_asked(subjects, build):
    assert subjects.ask(build, "encoder_padding").status == "not applicable"


def test_states_have_the_width_of_the_encoder(subjects):
    torch.manual_seed(0)
    assert subjects.ask(lambda: Decoder(16, 40), "encoder_padding").status == "passed"


def test_cross_attention_trains_if_states_are_passed(subjects):
    class Disconnected(Decoder):
        def visible(self, mask):
            return super().visible(mask)

        def forward(self, input_ids, encoder_hidden_states=None, encoder_attention_mask=None):
            if encoder_hidden_states is not None:
                encoder_hidden_states = encoder_hidden_states * 1.0
            with torch.no_grad():
                x = super().forward(input_ids, encoder_hidden_states, encoder_attention_mask)
            return x + self.head(self.embedding(input_ids))

    assert subjects.ask(Decoder, "gradient_flow").status == "passed"
    assert subjects.ask(Disconnected, "gradient_flow").status == "warned"


def encoder_decoder():
    config = transformers.BartConfig(
        vocab_size=61,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
        init_std=0.2,
    )
    return transformers.BartForConditionalGeneration(config)


class NoText(nn.Module):
    """Cross-attention without a result."""

    def forward(self, hidden_states, **arguments):
        return torch.zeros_like(hidden_states), None


def without_cross_attention():
    model = encoder_decoder()
    model.model.decoder.layers[0].encoder_attn = NoText()
    return model


@pytest.mark.parametrize(
    ("build", "status"),
    [(encoder_decoder, "passed"), (without_cross_attention, "failed"), (Decoder, "not applicable")],
)
def test_text_of_the_encoder_has_an_effect(subjects, build, status):
    assert subjects.ask(build, "encoder_effect").status == status


def without_mask_in_the_encoder():
    model = encoder_decoder()
    encode = model.model.encoder.forward
    model.model.encoder.forward = lambda *args, attention_mask=None, **more: encode(*args, **more)
    return model


@pytest.mark.parametrize(
    "build, status", [(encoder_decoder, "passed"), (without_mask_in_the_encoder, "failed")]
)
def test_padding_of_the_text_that_an_encoder_reads(subjects, build, status):
    assert subjects.ask(build, "encoder_padding").status == status

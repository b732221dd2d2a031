"""Sensitivity: inputs without an effect are reported, unless a window or visibility is declared."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.zoo.gpt import GPT, Windowed, encoder, gpt, placed, spec_of, windowed


class FirstTokenHidden(GPT):
    def visible(self, T, past, keep, documents):
        visible = super().visible(T, past, keep, documents).clone()
        visible[..., 1:, 0] = False
        return visible


@pytest.mark.parametrize("make", [gpt, placed])
def test_every_input_of_a_sound_model_has_an_effect(subjects, make):
    result = subjects.ask(make(), "token_effect")
    assert result.status == "passed"
    assert result.value > 0


@pytest.mark.parametrize(
    "build, count, last",
    # Two layers of five positions reach 8 positions back, of 24.
    [(Windowed, 15, "input 14 of 24"), (FirstTokenHidden, 1, "input 0 of 24")],
)
def test_inputs_without_an_effect_are_reported(subjects, build, count, last):
    for window, status in ((None, "warned"), ("full", "failed")):
        result = subjects.ask(spec_of(build, window=window), "token_effect")
        assert (result.status, result.value, result.where) == (status, count, last)


@pytest.mark.parametrize(
    "make",
    [
        windowed,
        encoder,
        lambda: replace(gpt(), visible=lambda ids: torch.ones(ids.shape[1], ids.shape[1]).tril()),
    ],
)
def test_declared_visibility_is_left_to_other_checks(subjects, make):
    assert subjects.ask(make(), "token_effect").status == "not applicable"


class Pooled(nn.Module):
    """Text classifier that pools at one token. The padding id is 2."""

    pad_token_id = 2

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 16), nn.Linear(16, 3)

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        x = (self.embedding(input_ids) * attention_mask[..., None]).cumsum(1)
        return self.head(x[torch.arange(len(x)), self.last(input_ids, attention_mask)])

    def last(self, input_ids, attention_mask):
        return (attention_mask * torch.arange(input_ids.shape[1])).argmax(-1)


class BeforeFirstPadding(Pooled):
    def last(self, input_ids, attention_mask):
        return (input_ids == 2).int().argmax(-1) - 1


class LastOfAnotherId(Pooled):
    def last(self, input_ids, attention_mask):
        return ((input_ids != 2) * torch.arange(input_ids.shape[1])).argmax(-1)


class NoPaddingId(BeforeFirstPadding):
    pad_token_id = None


@pytest.mark.parametrize(
    "build, status",
    [
        (BeforeFirstPadding, "failed"),
        (LastOfAnotherId, "passed"),
        (Pooled, "passed"),
        (NoPaddingId, "not applicable"),
        (GPT, "not applicable"),
    ],
)
def test_text_after_a_padding_id_is_read(subjects, build, status):
    assert subjects.ask(build, "text_after_padding_id").status == status

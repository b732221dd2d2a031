"""Sensitivity: inputs without an effect are reported, unless a window or visibility is declared."""

from dataclasses import replace

import pytest
import torch

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
def test_inputs_without_an_effect_are_a_warning(subjects, build, count, last):
    result = subjects.ask(spec_of(build, window=None), "token_effect")
    assert (result.status, result.value, result.where) == ("warned", count, last)


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

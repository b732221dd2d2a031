"""Bugs of the forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from stackwise.spec import ModelSpec
from tests.zoo.gpt import GPT, gpt, spec_of
from tests.zoo.mutant import mutant


def logits(spec: ModelSpec) -> Tensor:
    """In eval mode, of one batch."""
    with torch.no_grad():
        return spec.logits(spec.create().eval(), spec.batch(2, 12))


@mutant("21", twin=gpt, family="causality", source="classic", observable=logits)
def mask_one_too_wide():
    """Each position sees the next token: tril(diagonal=1)."""

    class Mutant(GPT):
        def visible(self, T, past, keep, documents):
            query, key = torch.arange(past, past + T)[:, None], torch.arange(past + T)[None]
            return (key <= query + 1)[None, None]

    return spec_of(Mutant)

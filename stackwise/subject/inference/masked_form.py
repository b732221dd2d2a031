"""Masked form: a call with an attention mask of ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.subject.call_form import CallForm, call_forms, forward_parameters

__all__ = ["MASK", "MaskedForm", "masked_forms"]

MASK = "attention_mask"


@dataclass(frozen=True)
class MaskedForm(CallForm):
    """Call form of a model that requires a mask. All positions are visible."""

    def __call__(self, model: nn.Module, inputs: Tensor, **more: Any) -> Any:
        """Call the model with a mask of ones."""
        ones = torch.ones(inputs.shape[:2], dtype=torch.long, device=inputs.device)
        return super().__call__(model, inputs, **{MASK: ones, **more})

    def _call(self) -> str:
        return f"{super()._call()} and {MASK}= of ones"


def masked_forms(model: nn.Module) -> Iterator[CallForm]:
    """Yield the call forms of a model that requires a mask."""
    mask = forward_parameters(model).get(MASK)
    if mask is not None and mask.default is mask.empty:
        for form in call_forms(model):
            if not form.in_batch:
                yield MaskedForm(form.keyword, with_targets=form.with_targets)

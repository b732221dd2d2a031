"""Encoder states: vectors that a decoder reads by cross-attention.

Shapes: B batch, T positions, S encoder positions, C width of the encoder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.engine.call import accepts, execute
from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call
from stackwise.subject.inference.inputs import width_candidates
from stackwise.support.system_errors import reraise_if_out_of_memory

__all__ = ["encoder_states", "output_with_encoder"]


@torch.no_grad()
def encoder_states(exam: Examination, length: int) -> Tensor | None:
    """Return random states (1, S, C) that have an effect on the output. None: the model reads no states."""
    config: Any = getattr(exam.base, "config", None)
    if not accepts(exam.base, "encoder_hidden_states") or getattr(config, "is_decoder", True) is False:
        return None
    generator = torch.Generator().manual_seed(exam.subject.seed)
    weight = next(exam.base.parameters())
    for width in width_candidates(exam.base):
        states = torch.randn(2, length, width, generator=generator).to(weight)
        try:
            one, two = (output_with_encoder(exam, each) for each in torch.split(states, 1))
        except Exception as error:  # such as a decoder without layers for cross-attention
            reraise_if_out_of_memory(error)
            continue
        if not torch.equal(one, two):
            return states[:1]
    return None


def output_with_encoder(
    exam: Examination, states: Tensor, keep: Tensor | None = None, model: nn.Module | None = None
) -> Tensor:
    """Return the output (1, T, V) for states (1, S, C), and a mask (1, S) if there is one.

    Without `model`, a new one is asked.
    """
    arguments = {"encoder_hidden_states": states}
    if keep is not None:
        arguments["encoder_attention_mask"] = keep
    inputs = exam.sequence(0, exam.lengths[0])[None]
    with exam.subject.fixed_randomness():
        return execute(exam.spec, model or exam.model(), Call(inputs, arguments=arguments))

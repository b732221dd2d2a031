"""Cross-attention: padding in the states of an encoder that a decoder reads."""

from __future__ import annotations

import torch

from stackwise.checks.check import check
from stackwise.checks.engine.call import accepts
from stackwise.checks.engine.examination import Examination
from stackwise.checks.probe.call import refusals
from stackwise.checks.probe.difference import NOT_REPEATED, relative_difference
from stackwise.checks.probe.encoder_states import encoder_states, output_with_encoder
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject

_LENGTH, _PADDING = 5, 3


@check
@torch.no_grad()
def encoder_padding(subject: Subject) -> CheckResult:
    """Is the output the same with masked padding in the encoder's states, and with a mask of ones?"""
    exam = Examination.of(subject)
    if not accepts(exam.base, "encoder_attention_mask"):
        return subject.not_applicable("needs encoder_hidden_states and encoder_attention_mask")
    if not exam.is_repeatable:
        return subject.not_applicable(NOT_REPEATED)
    states = encoder_states(exam, _LENGTH + _PADDING)
    if states is None:
        return subject.not_applicable("needs a model that reads encoder_hidden_states")
    keep = (torch.arange(states.shape[1], device=states.device)[None] < _LENGTH).long()
    try:
        output_with_encoder(exam, states, keep)
    except refusals():
        keep = keep.bool()
    alone = output_with_encoder(exam, states[:, :_LENGTH])
    gaps = {
        "a mask of ones": relative_difference(
            alone, output_with_encoder(exam, states[:, :_LENGTH], keep[:, :_LENGTH])
        ),
        f"{_PADDING} padded positions": relative_difference(alone, output_with_encoder(exam, states, keep)),
    }
    for case, gap in gaps.items():
        if not float(gap.max()) <= exam.limit:
            return subject.failed(
                float(gap.max()),
                exam.limit,
                where=case,
                meaning=f"The output changes if the encoder's states have {case}.",
                advice="Look for an encoder_attention_mask that is not passed on to cross-attention, that is "
                "replaced by the decoder's mask, or whose True and False are swapped.",
            )
    return subject.passed(max(float(gap.max()) for gap in gaps.values()), exam.limit)

"""Cross-attention: padding in the states of an encoder that a decoder reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stackwise.checks.check import check
from stackwise.checks.engine.call import accepts
from stackwise.checks.engine.examination import Examination
from stackwise.checks.probe.call import dtype_of, refusals
from stackwise.checks.probe.difference import NOT_REPEATED, relative_difference
from stackwise.checks.probe.encoder_states import encoder_states, output_with_encoder
from stackwise.checks.result import CheckResult
from stackwise.checks.subject import Subject
from stackwise.subject.encoder_decoder import Decoder

_LENGTH, _PADDING = 5, 3

# (examination, number of padded positions of the encoder, True if a mask is passed) -> output (T, V).
_Output = Callable[[Examination, int, bool], Tensor]


@check
@torch.no_grad()
def encoder_effect(subject: Subject) -> CheckResult:
    """Does the output of an encoder-decoder depend on the text of the encoder?"""
    exam = Examination.of(subject)
    if not isinstance(exam.base, Decoder):
        return subject.not_applicable("needs an encoder-decoder")
    if not exam.is_repeatable:
        return subject.not_applicable(NOT_REPEATED)
    alone = _with_source(exam, 0, False)
    model = exam.model()
    assert isinstance(model, Decoder)
    model.source = model.source.min() + model.source.max() - model.source
    other = exam.plain(model, exam.sequence(0, exam.lengths[0]))
    effect = float(relative_difference(alone, other).max())
    if effect > exam.limit:
        return subject.passed(effect, exam.limit)
    return subject.failed(
        effect,
        exam.limit,
        meaning="The output is the same for another text of the encoder.",
        advice="Look for cross-attention that is not called, whose result is not added, or that reads the "
        "states of the decoder.",
    )


@check
@torch.no_grad()
def encoder_padding(subject: Subject) -> CheckResult:
    """Is the output the same with masked padding in the encoder, and with a mask of ones?"""
    exam = Examination.of(subject)
    if not exam.is_repeatable:
        return subject.not_applicable(NOT_REPEATED)
    output = _with_source if isinstance(exam.base, Decoder) else _with_states(exam)
    if isinstance(output, str):
        return subject.not_applicable(output)
    if not output(exam, _PADDING, True).isfinite().all():  # a mask of float64 may overflow in float32
        exam = exam.in_dtype("own")
    alone = output(exam, 0, False)
    cases = {"a mask of ones": 0, f"{_PADDING} masked positions of padding": _PADDING}
    gaps = {case: relative_difference(alone, output(exam, n, True)) for case, n in cases.items()}
    for case, gap in gaps.items():
        if not float(gap.max()) <= exam.limit:
            return subject.failed(
                float(gap.max()),
                exam.limit,
                where=case,
                meaning=f"The output changes if the encoder gets {case}.",
                advice="Look for a mask that is not passed on to the encoder or to cross-attention, that is "
                "replaced by the decoder's mask, or whose True and False are swapped.",
            )
    return subject.passed(max(float(gap.max()) for gap in gaps.values()), exam.limit)


def _with_states(exam: Examination) -> _Output | str:
    """Return the function that passes states of an encoder, or the reason why there is none."""
    if not accepts(exam.base, "encoder_attention_mask"):
        return "needs an encoder, or encoder_hidden_states and encoder_attention_mask"
    states = encoder_states(exam, _LENGTH + _PADDING)
    if states is None:
        return "needs a model that reads encoder_hidden_states"
    keep = (torch.arange(states.shape[1], device=states.device)[None] < _LENGTH).long()
    try:
        output_with_encoder(exam, states, keep)
    except refusals():
        keep = keep.bool()

    def output(exam: Examination, n_padding: int, has_mask: bool) -> Tensor:
        own, end = states.to(dtype_of(exam.base)), _LENGTH + n_padding
        return output_with_encoder(exam, own[:, :end], keep[:, :end] if has_mask else None)

    return output


def _with_source(exam: Examination, n_padding: int, has_mask: bool) -> Tensor:
    """Return the output of an encoder-decoder whose encoder reads a text with padding on its right."""
    model = exam.model()
    assert isinstance(model, Decoder)
    text = model.source
    model.source = torch.cat((text, text[:, :n_padding]), dim=1)
    if has_mask:
        model.source_mask = (torch.arange(model.source.shape[1])[None] < text.shape[1]).long().to(text.device)
    return exam.plain(model, exam.sequence(0, exam.lengths[0]))

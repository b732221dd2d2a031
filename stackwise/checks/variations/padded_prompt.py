"""Padded prompt: rows of a prompt are padded on the right, and further tokens follow through the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call, Place, Question
from stackwise.checks.engine.variation import (
    DECODE,
    MASKED,
    Need,
    Variation,
)
from stackwise.checks.probe.call import has_fixed_state
from stackwise.checks.variations.padding import add_padding


class PaddedPrompt(Variation):
    """Pad each row of the prompt on the right. Value: the padding of the longest row."""

    name = "padded_prompt"
    family = "padding"
    question = "Does a row continue in the same way after a prompt with padding on the right?"
    rank = 39
    needs = (
        MASKED,
        DECODE,
        Need(
            "needs padding_sides with 'right', and several lengths",
            lambda exam: "right" in exam.spec.padding_sides and len(exam.lengths) > 1,
        ),
        Need(
            "needs a model that takes padding before further tokens of a row",
            # A state of fixed size in the cache must skip padding.
            lambda exam: has_fixed_state(exam.subject, exam.plain_inputs) or _allowed_inside(exam),
        ),
    )
    choices, simplest = range(1, 7), 1
    words = "the prompt has padding on the right"
    includes = frozenset({"cache_parts"})
    explained_by = frozenset({"later_tokens", "hidden_tokens", "padded_rows", "cache_parts", "turns"})
    excludes = frozenset({"padded_rows", "documents", "labels", "train_mode", "recomputation"})
    advice = (
        "Look for a recurrent state or a convolution that includes the padding after the prompt. Check that "
        "positions and masks of the next tokens do not count the padding."
    )

    def correct_if(self, exam: Examination, value: int) -> str | None:
        """Return a condition for a recurrent model whose padding on the right is only assumed."""
        if "padding_sides" in exam.spec.assumed and not _allowed_inside(exam):
            return "prompts never have padding on the right; then declare padding_sides without 'right'"
        return None

    def change(self, question: Question, value: int, exam: Examination) -> None:
        """Divide the row into parts, if it is not divided yet, and add padding to the first part."""
        question.parts, question.gradients = question.parts or question.prompt_and_tokens(3), False
        add_padding(question, value, exam, is_left=True)  # `edit` moves it to the right

    def edit(self, call: Call, value: int, exam: Examination) -> None:
        """Move the padding of the prompt to its right side."""
        call.order = _padding_last(call, call.parts[0])


def _padding_last(call: Call, width: int) -> Tensor:
    """Return the order (B, W) in which the padding in the first columns follows the other ones."""
    assert call.keep is not None
    order = torch.arange(call.keep.shape[1], device=call.keep.device).repeat(len(call.keep), 1)
    order[:, :width] = (~call.keep[:, :width]).long().argsort(dim=1, stable=True)
    return order


def _allowed_inside(exam: Examination) -> bool:
    """Return True if padding inside a row does not change its output: the mask determines positions."""
    width, n_hidden = exam.longest, min(3, exam.longest - exam.lengths[0])
    if n_hidden < 1:
        return False
    inputs = torch.cat((exam.filler(1, n_hidden)[0], exam.sequence(0, width - n_hidden)))[None]
    keep = (torch.arange(width, device=inputs.device) >= n_hidden)[None]
    call = Call(inputs, [Place(0, n_hidden, width)], keep)
    call.order = _padding_last(call, n_hidden + 2)
    return exam.agrees(call)

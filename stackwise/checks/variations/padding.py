"""Padding: hidden positions on either side of a sequence."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call, Place, Question, Segment
from stackwise.checks.engine.variation import (
    DECODE,
    MASKED,
    PADDING_SIDES,
    PER_POSITION,
    Need,
    Refused,
    Switch,
    Variation,
)
from stackwise.checks.probe.call import has_fixed_state, reads_padding_by_a_state


class Padding(Variation):
    """Pad each row on one side. Value: the side, and the padding of the longest row."""

    name = "padded_rows"
    check, family = "padding_amount", "padding"
    question = "Does a row give the same output with padding?"
    rank = 40
    needs = (
        MASKED,
        PADDING_SIDES,
        Need("needs a model that takes several lengths", lambda exam: len(exam.lengths) > 1),
    )
    words = "there is padding on the {[side]}"
    explained_by = frozenset({"later_tokens", "hidden_tokens"})
    advice = (
        "Look for attention without the mask, positions that count padding, a state or convolution that "
        "reads padding, and pooling at an index that is counted from the other side."
    )

    def draw(self, exam: Examination, rng: random.Random) -> dict[str, Any]:
        """Draw a side and an amount. Outputs of causal models can read padding only on their left."""
        sides = exam.spec.padding_sides
        if exam.spec.causal and "left" in sides:
            sides = (*sides, "left", "left")
        return {"side": rng.choice(sides), "amount": rng.randint(1, 6)}

    def simpler(self, value: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield less padding."""
        if value["amount"] > 1:
            yield {**value, "amount": 1}

    def correct_if(self, exam: Examination, value: dict[str, Any]) -> str | None:
        """Return a condition for a recurrent model whose padding on the left is only assumed."""
        if value["side"] == "left" and reads_padding_by_a_state(exam.subject, exam.longest):
            return "padding is always on the right; then declare padding_sides=('right',)"
        return None

    def change(self, question: Question, value: dict[str, Any], exam: Examination) -> None:
        """Add padding."""
        is_left = value["side"] == "left"
        if question.parts and not is_left:
            raise Refused("padded_prompt tests padding on the right before further tokens")
        add_padding(question, value["amount"], exam, is_left=is_left)


def add_padding(question: Question, amount: int, exam: Examination, *, is_left: bool) -> None:
    """Add padding to each row, after shortening the rows so that it fits.

    A prompt contains all the padding, as in generation.

    Args:
        question: its rows, mask and parts are changed.
        amount: padding of the longest row, in positions.
        exam: the model.
        is_left: add it before the row, otherwise after it.

    Raises:
        Refused: there is no room.
    """
    later = sum(each.length for each in question.rows[0] if each.kind == "later")
    amount = min(amount, exam.longest - exam.lengths[0] - later)
    if amount < 1:
        raise Refused("there is no room for padding")
    room = exam.longest - amount - later
    rows = [
        [s if s.kind == "later" else replace(s, length=min(s.length, room)) for s in row]
        for row in question.rows
    ]
    widest = max(sum(s.length for s in row) for row in rows) + amount
    question.rows = []
    for row in rows:
        padding = Segment("padding", widest - sum(s.length for s in row))
        question.rows.append([padding, *row] if is_left else [*row, padding])
    question.mask = True
    if question.parts:
        most = max(row[0].length for row in question.rows)
        question.parts = (most + question.parts[0], *question.parts[1:], *question.parts[-1:])


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


class EmptyRow(Switch):
    """Add a row of which the mask keeps nothing."""

    name = "empty_row"
    check, family = "padding_empty_row", "padding"
    question = "Are the other rows and all gradients the same if one row is only padding?"
    words = "one row of the batch is only padding"
    rank = 38
    needs = MASKED, PADDING_SIDES, PER_POSITION  # an empty row has no mean and no last token
    includes = frozenset({"mask_of_ones"})  # it passes a mask
    advice = (
        "If all keys of a query are masked, its softmax is NaN. Let padded queries attend to themselves, or "
        "mask with a finite number and add it once: finfo.min added twice is -inf. A NaN times a weight of 0 "
        "is still NaN in the backward pass."
    )

    def change(self, question: Question, value: bool, exam: Examination) -> None:
        """Add the row."""
        question.rows.append([Segment("padding", question.width)])
        question.mask = True

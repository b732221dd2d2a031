"""Padding: hidden positions beside the sequence."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call, Place, Question, Segment
from stackwise.checks.engine.variation import Refused, Variation
from stackwise.checks.probe.call import reads_padding_by_a_state


class Padding(Variation):
    """Pad each row on one side. Value: the side, and the padding of the longest row.

    With a cache, the prompt is padded on this side, and further tokens follow.
    """

    name = "padded_rows"
    check, family = "padding_amount", "padding"
    question = "Does a row give the same output with padding?"
    rank = 40
    explained_by = frozenset({"later_tokens", "hidden_tokens"})
    advice = (
        "Look for attention without the mask, positions that count padding, a state or convolution that "
        "reads padding, and pooling at an index that is counted from the other side."
    )

    def missing(self, exam: Examination) -> str:
        """Require `masked`, a side and several lengths."""
        if exam.spec.masked is None:
            return "needs masked: (model, inputs, keep) -> output, of a batch with padding"
        if not exam.spec.padding_sides:
            return "needs padding_sides: the model claims no side on which padding may be"
        return "" if len(exam.lengths) > 1 else "needs a model that takes several lengths"

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

    def text(self, value: dict[str, Any]) -> str:
        """Return the side."""
        return f"there is padding on the {value['side']}"

    def correct_if(self, exam: Examination, value: dict[str, Any]) -> str | None:
        """Return a condition for a recurrent model whose padding on the left is only assumed."""
        if value["side"] == "left" and reads_padding_by_a_state(exam.subject, exam.longest):
            return "padding is always on the right; then declare padding_sides=('right',)"
        return None

    def change(self, question: Question, value: dict[str, Any], exam: Examination) -> None:
        """Add padding, after shortening the rows so that it fits."""
        left = value["side"] == "left"
        if question.parts and not left and not exam.once("padding inside", lambda: _inside(exam)):
            raise Refused("the model takes no padding before further tokens of a row")
        later = sum(each.length for each in question.rows[0] if each.kind == "later")
        amount = min(value["amount"], exam.longest - exam.lengths[0] - later)
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
            question.rows.append([padding, *row] if left or question.parts else [*row, padding])
        question.mask = True
        if question.parts:
            # A prompt contains all the padding, as in generation.
            most = max(row[0].length for row in question.rows)
            question.parts = (most + question.parts[0], *question.parts[1:], *question.parts[-1:])

    def edit(self, call: Call, value: dict[str, Any], exam: Examination) -> None:
        """Move the padding of a prompt to its right side."""
        if call.parts and value["side"] == "right":
            call.order = _padding_last(call, call.parts[0])


def _padding_last(call: Call, width: int) -> Tensor:
    """Return the order (B, W) in which the padding in the first columns follows the other ones."""
    assert call.keep is not None
    order = torch.arange(call.keep.shape[1], device=call.keep.device).repeat(len(call.keep), 1)
    order[:, :width] = (~call.keep[:, :width]).long().argsort(dim=1, stable=True)
    return order


def _inside(exam: Examination) -> bool:
    """Return True if padding inside a row does not change its output, so that the mask gives positions."""
    width, n_hidden = exam.longest, min(3, exam.longest - exam.lengths[0])
    if n_hidden < 1:
        return False
    sequence = exam.sequence(0, width - n_hidden)
    inputs = torch.cat((exam.filler(1, n_hidden)[0], sequence))[None]
    keep = (torch.arange(width, device=inputs.device) >= n_hidden)[None]
    call = Call(inputs, [sequence], [Place(0, n_hidden, width)], keep)
    call.order = _padding_last(call, n_hidden + 2)
    return exam.agrees(call)

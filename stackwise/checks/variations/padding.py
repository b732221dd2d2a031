"""Padding: hidden positions beside the sequence."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Question, Segment
from stackwise.checks.engine.variation import (
    MASKED,
    PADDING_SIDES,
    Need,
    Refused,
    Variation,
)
from stackwise.checks.probe.call import reads_padding_by_a_state


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

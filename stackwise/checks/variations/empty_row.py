"""Empty row: a row of nothing but padding beside the others."""

from __future__ import annotations

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Question, Segment
from stackwise.checks.engine.variation import (
    MASKED,
    PADDING_SIDES,
    PER_POSITION,
    Switch,
)


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

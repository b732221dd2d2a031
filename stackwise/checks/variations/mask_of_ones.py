"""Mask of ones: a padding mask is passed although nothing is hidden."""

from __future__ import annotations

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Question
from stackwise.checks.engine.variation import Switch


class MaskOfOnes(Switch):
    """Pass a mask that hides nothing."""

    name = "mask_of_ones"
    question = "Is the output the same with a padding mask of ones as without a mask?"
    words = "a mask of ones is passed"
    rank = 35
    excludes = frozenset({"padded_rows"})  # it passes a mask already
    advice = (
        "Look for a branch that is taken if a mask is given, and that drops or replaces another argument."
    )

    def missing(self, exam: Examination) -> str:
        """Return why the variation does not apply: the spec has no `masked`."""
        if exam.spec.masked is None:
            return "needs masked: (model, inputs, keep) -> output, of a batch with padding"
        return ""

    def change(self, question: Question, value: bool, exam: Examination) -> None:
        """Pass the mask. The value is always True."""
        question.mask = True

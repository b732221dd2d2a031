"""Later tokens: inputs after the sequence, which a causal model must not read."""

from __future__ import annotations

import random
from collections.abc import Iterator

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Question, Segment
from stackwise.checks.engine.variation import Refused, Variation


class LaterTokens(Variation):
    """Append tokens to each row. Value: their number."""

    name = "later_tokens"
    question = "Does a sequence give the same output if more tokens follow?"
    rank = 30
    explained_by = frozenset({"hidden_tokens"})
    single_checks = ("causality",)
    advice = (
        "Look for attention without a causal mask, convolutions that are centred, and statistics over all "
        "positions. For an encoder, declare causal=False."
    )

    def missing(self, exam: Examination) -> str:
        """Require a causal model of several lengths."""
        if not exam.spec.causal or not exam.spec.per_position:
            return "needs a causal model with an output per position"
        return "" if len(exam.lengths) > 1 else "needs a model that takes several lengths"

    def draw(self, exam: Examination, rng: random.Random) -> int:
        """Draw a number from 1 to 6."""
        return rng.randint(1, 6)

    def simpler(self, value: int) -> Iterator[int]:
        """Yield one token."""
        if value > 1:
            yield 1

    def text(self, value: int) -> str:
        """Return the number of tokens."""
        return f"{value} later token{'s follow' if value > 1 else ' follows'}"

    def change(self, question: Question, value: int, exam: Examination) -> None:
        """Append the tokens, after shortening the rows so that they fit."""
        room = exam.longest - value
        if room < exam.lengths[0] or any(len(row) > 1 for row in question.rows):
            raise Refused("there is no room for later tokens")
        question.rows = [
            [Segment("sequence", min(row[0].length, room)), Segment("later", value)] for row in question.rows
        ]

"""Batch: more rows in the same call."""

from __future__ import annotations

import random
from collections.abc import Iterator

from torch import nn

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Question, Segment
from stackwise.checks.engine.variation import Variation

# Share of the rows that are copies of the first one.
_COPIES = 0.2


class Batch(Variation):
    """Add rows. Value: length of each, 0 for a copy of the first row.

    Without padding, all rows are cut to the shortest.
    """

    name = "batch"
    check, family = "batch_invariance", "invariance"
    question = "Does a row give the same output in a batch as alone?"
    rank = 10
    advice = "Look for a softmax, mean or norm over the batch dimension, and for reshape and view across it."

    def draw(self, exam: Examination, rng: random.Random) -> list[int]:
        """Draw one, two or six rows."""
        return [
            rng.choice(exam.drawn_lengths) if rng.random() > _COPIES else 0
            for _ in range(rng.choice((1, 2, 2, 6)))
        ]

    def simpler(self, value: list[int]) -> Iterator[list[int]]:
        """Yield fewer rows."""
        for count in (1, 2):
            if len(value) > count:
                yield value[:count]

    def text(self, value: list[int]) -> str:
        """Return the number of rows."""
        copies = value.count(0)
        return f"the batch has {1 + len(value)} rows" + (f", {1 + copies} of them equal" if copies else "")

    def advice_for(self, exam: Examination) -> str:
        """Name a layer that takes rows in the second dimension, which is the usual cause."""
        kinds = (nn.RNNBase, nn.MultiheadAttention)
        layers = (
            (name, each)
            for name, each in exam.base.named_modules()
            if isinstance(each, kinds) and not each.batch_first
        )
        name = next((name for name, _ in layers), None)
        if name is None:
            return self.advice
        return (
            f"{name or 'The model'} has batch_first=False, so it reads (T, B, ...): use batch_first=True, or "
            "declare forward=lambda m, x: m(x.transpose(0, 1)).transpose(0, 1). Otherwise: " + self.advice
        )

    def change(self, question: Question, value: list[int], exam: Examination) -> None:
        """Add the rows."""
        first = question.rows[0][0].length
        question.rows += [
            [Segment("sequence", length) if length else Segment("sequence", first, number=0)]
            for length in value
        ]

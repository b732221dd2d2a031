"""Batch: more rows in the same call."""

from __future__ import annotations

import random
from collections.abc import Iterator

from torch import nn

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Question, Segment
from stackwise.checks.engine.variation import Variation


class Batch(Variation):
    """Add one or two rows. Value: their lengths, which count only if there is padding."""

    name = "batch"
    check, family = "batch_invariance", "invariance"
    question = "Does a row give the same output in a batch as alone?"
    rank = 10
    advice = "Look for a softmax, mean or norm over the batch dimension, and for reshape and view across it."

    def draw(self, exam: Examination, rng: random.Random) -> list[int]:
        """Draw one or two lengths."""
        return [rng.choice(exam.lengths) for _ in range(rng.choice((1, 2)))]

    def simpler(self, value: list[int]) -> Iterator[list[int]]:
        """Yield fewer rows."""
        if len(value) > 1:
            yield value[:1]

    def text(self, value: list[int]) -> str:
        """Return the number of rows."""
        return f"the batch has {1 + len(value)} rows"

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
        question.rows += [[Segment("sequence", length)] for length in value]

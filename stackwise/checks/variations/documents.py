"""Documents: several sequences packed into one row."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Question, Segment
from stackwise.checks.engine.variation import Need, Variation


class Documents(Variation):
    """Put documents in front of the sequence of each row. Value: their lengths."""

    name = "documents"
    check, family = "packing_alone", "packing"
    question = "Does a document give the same output in a packed row as in a row of its own?"
    rank = 20
    needs = (
        Need(
            "needs packed: (model, inputs, documents) -> output, of rows of several documents",
            lambda exam: exam.spec.packed is not None,
        ),
        Need("needs at least 4 positions", lambda exam: exam.longest >= 4),
    )
    explained_by = frozenset({"later_tokens"})
    excludes = frozenset({"padded_rows", "cache_parts"})
    advice = (
        "Look for a mask that does not separate documents, an argument that overrides it, positions that do "
        "not restart at each document, and convolutions or states that cross the border."
    )

    def correct_if(self, exam: Examination, value: list[int]) -> str | None:
        """Return a condition if the argument was inferred and separates documents only partly."""
        if "packed" in exam.spec.assumed:
            return "segment_ids mark parts of one text, and some layers read across them on purpose"
        return None

    def draw(self, exam: Examination, rng: random.Random) -> list[int]:
        """Draw one or two short lengths."""
        return [rng.randint(1, max(1, exam.longest // 4)) for _ in range(rng.choice((1, 2)))]

    def simpler(self, value: list[int]) -> Iterator[list[int]]:
        """Yield fewer documents."""
        if len(value) > 1:
            yield value[:1]

    def text(self, value: list[int]) -> str:
        """Return the number of documents."""
        return f"the row has {1 + len(value)} packed documents"

    def change(self, question: Question, value: list[int], exam: Examination) -> None:
        """Add the documents, and shorten the sequence if the row becomes too long."""
        question.documents = True
        room = max(1, exam.longest - sum(value))
        front = [Segment("sequence", length) for length in value]
        question.rows = [
            [*front, *(replace(each, length=min(each.length, room)) for each in row)] for row in question.rows
        ]

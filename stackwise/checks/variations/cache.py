"""Cache: the tokens come in parts, each with the cache of the parts before."""

from __future__ import annotations

import random
from collections.abc import Iterator

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import REST, Question
from stackwise.checks.engine.variation import Variation


class Cache(Variation):
    """Pass the tokens in parts through the cache. Value: sizes of the parts; the last one repeats."""

    name = "cache_parts"
    check, family = "cache_decoding", "cache"
    question = "Is the output the same if a sequence is decoded through the cache in parts of any size?"
    rank = 33
    explained_by = frozenset({"later_tokens", "hidden_tokens"})
    excludes = frozenset({"documents", "labels", "train_mode", "recomputation"})
    advice = (
        "Look for positions that restart at 0, a mask with a wrong offset, a cached state that only calls "
        "with one token use, a truncated cache, and parts of the cache that are not returned."
    )

    def missing(self, exam: Examination) -> str:
        """Require `decode` and a causal model."""
        if exam.spec.decode is None:
            problem = exam.spec.cache_problem
            return problem or "needs decode: (model, inputs, cache) -> (output, cache)"
        return "" if exam.spec.causal else "needs a causal model"

    def draw(self, exam: Examination, rng: random.Random) -> list[int]:
        """Draw a prompt, one or two sizes of the parts that follow it, and often one part for the rest."""
        sizes = [rng.choice((1, 2, 2, 3, 5, REST)) for _ in range(rng.choice((1, 2)))]
        end = [REST] if sizes[-1] < 3 and rng.random() < 0.5 else []
        return [rng.choice((1, 2, 3, 4, 11)), *sizes, *end]

    def first_values(self, exam: Examination) -> Iterator[list[int]]:
        """Yield single tokens from the start, and after a prompt: the usual ways to generate text."""
        yield from ([1], [4, 1])

    def simpler(self, value: list[int]) -> Iterator[list[int]]:
        """Yield single tokens, a first part and the rest, then fewer sizes."""
        if value != [1]:
            yield [1]
        for short in ([value[0], REST], [1, REST], value[:2], value[:1]):
            if len(short) < len(value) or (len(short) == len(value) and short[-1] > value[-1]):
                yield short

    def text(self, value: list[int]) -> str:
        """Return the sizes."""
        if value == [REST]:
            return "the tokens come through an empty cache"
        if value == [1]:
            return "the tokens come through the cache one at a time"
        sizes = ", ".join("the rest" if size == REST else str(size) for size in value)
        return f"the tokens come through the cache in parts of {sizes}" + ", ..." * (value[-1] != REST)

    def change(self, question: Question, value: list[int], exam: Examination) -> None:
        """Divide the row. A cache may be detached, so there are no gradients."""
        question.parts, question.gradients = tuple(value), False

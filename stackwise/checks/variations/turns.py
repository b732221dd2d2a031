"""Turns: other rows are decoded between the parts of these, with a cache of their own."""

from __future__ import annotations

import torch

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Question
from stackwise.checks.engine.variation import DECODE, Need, Switch
from stackwise.subject.cached_call import cache_tensors


class Turns(Switch):
    """Decode other rows after each part."""

    name = "turns"
    check, family = "cache_independence", "cache"
    question = "Is the output the same if another sequence, with another cache, is decoded in between?"
    words = "another sequence is decoded between the parts"
    rank = 36
    needs = (
        DECODE,
        Need(
            "needs decode to return the cache; this model keeps it in a module",
            lambda exam: _returns_cache(exam),
        ),
    )
    includes = frozenset({"cache_parts"})
    explained_by = frozenset({"later_tokens", "cache_parts"})
    excludes = frozenset({"documents", "labels", "train_mode", "recomputation"})
    advice = (
        "Keep positions, masks and lengths in the cache, not in the model: a counter on the module counts "
        "the tokens of every sequence, and is wrong for the cache of another one."
    )

    def change(self, question: Question, value: bool, exam: Examination) -> None:
        """Divide the row into parts, if it is not divided yet."""
        question.parts = question.parts or question.prompt_and_tokens(2)
        question.gradients, question.in_turns = False, True


def _returns_cache(exam: Examination) -> bool:
    assert exam.spec.decode is not None
    with torch.no_grad():
        _, cache = exam.spec.decode(exam.model(), exam.sequence(0, exam.lengths[0])[None], None)
    return any(True for _ in cache_tensors(cache))

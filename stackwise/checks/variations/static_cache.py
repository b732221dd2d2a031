"""Static cache: a cache of transformers that is allocated once."""

from __future__ import annotations

import sys
from typing import Any

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import REST, Question
from stackwise.checks.engine.variation import Variation


class StaticCache(Variation):
    """Pass a `transformers.StaticCache` with the first part. Value: its room beyond the row."""

    name = "static_cache"
    question = "Does a static cache give the same output as no cache?"
    rank = 34
    choices, simplest = (0, 1, 8), 0
    words = "a StaticCache is passed"
    explained_by = frozenset({"later_tokens", "hidden_tokens", "cache_parts"})
    excludes = frozenset({"documents", "labels", "train_mode", "recomputation", "extra_outputs"})
    advice = "Look for a mask with the length of the tokens so far. It needs the length of the cache."

    def missing(self, exam: Examination) -> str:
        """Require a causal model of transformers with a cache."""
        transformers: Any = sys.modules.get("transformers")
        is_theirs = transformers is not None and isinstance(exam.base, transformers.PreTrainedModel)
        if not is_theirs or exam.spec.decode is None or not exam.spec.causal:
            return "needs a causal model of transformers with a cache"
        # transformers sets this attribute for models that accept a static cache.
        return "" if getattr(exam.base, "_can_compile_fullgraph", True) else "the model has no static cache"

    def change(self, question: Question, value: int, exam: Examination) -> None:
        """Pass the cache, and two parts if the row is not divided yet."""
        question.parts = question.parts or (3, REST)
        question.gradients = False
        theirs: Any = sys.modules["transformers"]
        question.first_cache = lambda model: theirs.StaticCache(
            config=model.config, max_cache_len=question.width + value
        )

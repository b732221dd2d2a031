"""Cache operations: the cache is copied, cropped, reordered, repeated or reset between the parts."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import REST, Call, Question, Segment
from stackwise.checks.engine.variation import DECODE, Need, Refused, Variation
from stackwise.subject.cached_call import cache_tensors

# In the order in which they are executed. The last two decode rows in the order of the next part.
_TEXTS = {
    "reset": "the cache was used before and reset",
    "reorder_cache": "the rows of the cache are reordered between the parts",
    "batch_repeat_interleave": "the rows of the cache are repeated, and one of each two is selected",
    "crop": "other tokens are decoded and cropped from the cache before each part",
    "copy": "decoding goes on with a copy of the cache, after its original was used",
}


class CacheOperations(Variation):
    """Change the cache between the parts. Value: names of methods of the cache, or "copy"."""

    name = "cache_operations"
    family = "cache"
    question = "Is the output the same if the cache is copied, cropped, reordered, repeated or reset?"
    rank = 37
    needs = DECODE, Need("needs decode to return a cache that can be copied", lambda exam: _operations(exam))
    explained_by = frozenset({"later_tokens", "hidden_tokens", "turns"})
    includes = frozenset({"cache_parts"})
    excludes = frozenset({"documents", "labels", "train_mode", "recomputation"})
    advice = (
        "Look for a part of the cache that the operation does not change, such as a length, positions or a "
        "state, and for tensors that a copy shares with its original."
    )

    def draw(self, exam: Examination, rng: random.Random) -> list[str]:
        """Draw one or two operations, or all of them."""
        names = _operations(exam)
        chosen = rng.sample(names, min(rng.choice((1, 2, len(names))), len(names)))
        return [name for name in names if name in chosen]

    def simpler(self, value: list[str]) -> Iterator[list[str]]:
        """Yield each operation alone."""
        if len(value) > 1:
            yield from ([name] for name in value)

    def text(self, value: list[str]) -> str:
        """Return the operations."""
        return " and ".join(_TEXTS[name] for name in value)

    def change(self, question: Question, value: list[str], exam: Examination) -> None:
        """Divide the row into parts, if it is not divided yet. Add a row, so that rows can be reordered."""
        question.parts = question.parts or question.prompt_and_tokens(3)
        question.gradients = False
        question.operation = partial(_operated, names=value)
        question.turns_rows = "reorder_cache" in value
        if len(question.rows) == 1 and not {"reorder_cache", "batch_repeat_interleave"}.isdisjoint(value):
            question.rows.append([Segment("sequence", exam.longest)])


def _operated(
    cache: Any, call: Call, columns: slice, decode: Callable[..., tuple[Any, Any]], *, names: list[str]
) -> Any:
    """Return the cache after the operations."""
    n_rows, device = len(call.inputs), call.inputs.device
    for name in names:
        if name == "reset" and not columns.start:
            _, cache = decode(call.others, cache)
            cache.reset()
        elif not columns.start:
            continue
        elif name == "reorder_cache":
            cache.reorder_cache(torch.arange(n_rows, device=device).roll(-1))
        elif name == "batch_repeat_interleave":
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.arange(1, 2 * n_rows, 2, device=device))
        elif name == "crop":
            _, cache = decode(call.others, cache)
            cache.crop(columns.start - columns.stop)
        elif name == "copy":
            if not any(True for _ in cache_tensors(cache)):
                raise Refused("the model keeps the cache in a module")
            original, cache = cache, copy.deepcopy(cache)
            decode(call.others, original)
    return cache


def _operations(exam: Examination) -> list[str]:
    """Return the operations that the cache of a model has, and that it does not refuse."""
    return exam.once("cache_operations", lambda: [name for name in _TEXTS if _runs(exam, name)])


def _runs(exam: Examination, name: str) -> bool:
    inputs = torch.stack([exam.sequence(number, exam.lengths[-1]) for number in range(2)])
    question = Question([], parts=(1, REST), operation=partial(_operated, names=[name]))
    return exam.runs(Call(inputs, question=question, others=inputs))

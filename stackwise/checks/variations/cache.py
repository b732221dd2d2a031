"""Cache: the tokens come in parts, each with the cache of the previous parts."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import REST, Call, Question, Segment
from stackwise.checks.engine.variation import DECODE, Need, Refused, Switch, Variation
from stackwise.subject.cached_call import cache_tensors

# In the order in which they are executed. The last two decode rows in the order of the next part.
_TEXTS = {
    "reset": "the cache was used before and reset",
    "reorder_cache": "the rows of the cache are reordered between the parts",
    "batch_repeat_interleave": "the rows of the cache are repeated, and one of each two is selected",
    "crop": "other tokens are decoded and cropped from the cache before each part",
    "copy": "decoding goes on with a copy of the cache, after its original was used",
}


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

"""Merged: adapters, such as those of LoRA, are merged into the weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from torch import nn

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Question
from stackwise.checks.engine.variation import Variation


class Merged(Variation):
    """Merge all adapters. Value: "merge", or "unmerge" to undo it afterwards."""

    name = "merged"
    question = "Is the output the same if adapters are merged into the weights?"
    rank = 58
    excludes = frozenset({"copies", "train_mode", "recomputation"})
    advice = (
        "Look for a scale or bias that only one of the two ways applies, and for a norm or product that is "
        "computed from weights that another adapter has changed already."
    )

    def missing(self, exam: Examination) -> str:
        """Require merge_adapter() of the model, or merge() and unmerge() of its layers."""
        has = any(True for _ in _functions(exam.base, "merge"))
        return (
            "" if has else "needs merge_adapter() and unmerge_adapter(), or layers with merge() and unmerge()"
        )

    def draw(self, exam: Examination, rng: random.Random) -> str:
        """Draw whether to undo it."""
        ways = [way for way in ("merge", "unmerge") if any(True for _ in _functions(exam.base, way))]
        return rng.choice(ways)

    def simpler(self, value: str) -> Iterator[str]:
        """Yield merging alone."""
        if value == "unmerge":
            yield "merge"

    def text(self, value: str) -> str:
        """Return the variation in words."""
        return "adapters are merged" + (" and unmerged again" if value == "unmerge" else "")

    def change(self, question: Question, value: str, exam: Examination) -> None:
        """Compare no gradients, because merged weights have others."""
        question.gradients = False

    def prepare(self, model: nn.Module, value: str, exam: Examination) -> nn.Module:
        """Merge them, and undo it if this is the value."""
        for way in ("merge", "unmerge")[: 1 + (value == "unmerge")]:
            for function in _functions(model, way):
                function()
        return model


def _functions(model: nn.Module, way: str) -> Iterator[Callable[[], object]]:
    """Yield the function of the model, or those of its layers."""
    whole = getattr(model, f"{way}_adapter", None)
    if callable(whole):
        yield whole
        return
    for module in model.modules():
        if all(callable(getattr(module, name, None)) for name in ("merge", "unmerge")):
            yield getattr(module, way)

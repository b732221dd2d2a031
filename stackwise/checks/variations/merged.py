"""Merged: adapters, such as those of LoRA, are merged into the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

from torch import nn

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.variation import Variation


class Merged(Variation):
    """Merge all adapters. Value: "merge", or "unmerge" to undo it afterwards."""

    name = "merged"
    question = "Is the output the same if adapters are merged into the weights?"
    rank = 58
    no_values = "needs merge_adapter() and unmerge_adapter(), or layers with merge() and unmerge()"
    simplest = "merge"
    words: ClassVar[dict[str, str]] = {
        "merge": "adapters are merged",
        "unmerge": "adapters are merged and unmerged again",
    }
    sets: ClassVar[dict[str, bool]] = {"gradients": False}  # merged weights have others
    excludes = frozenset({"copies", "train_mode", "recomputation"})
    advice = (
        "Look for a scale or bias that only one of the two ways applies, and for a norm or product that is "
        "computed from weights that another adapter has changed already."
    )

    def values(self, exam: Examination) -> list[str]:
        """Return the ways that the model has."""
        return [way for way in self.words if any(_functions(exam.base, way))]

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

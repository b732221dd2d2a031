"""Logits to keep: only the last outputs of each row are computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.checks.engine.call import accepts
from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call, Question
from stackwise.checks.engine.variation import Variation

_NAMES = ("logits_to_keep", "num_logits_to_keep")


class LogitsToKeep(Variation):
    """Ask for the last outputs only. Value: their number."""

    name = "logits_to_keep"
    question = "Are the last outputs the same if only these are computed?"
    rank = 49
    # Each part of a cached call would have its own last outputs.
    excludes = frozenset({"cache_parts", "static_cache", "turns", "cache_operations", "padded_prompt"}) | {
        "labels",
        "recomputation",
    }
    advice = (
        "Look for a slice of the hidden states at the wrong end, or of the wrong length, and for an argument "
        "that has no effect."
    )

    def missing(self, exam: Examination) -> str:
        """Require a parameter."""
        return "" if _name(exam) and exam.spec.per_position else f"needs a parameter {_NAMES[0]}"

    def draw(self, exam: Examination, rng: random.Random) -> int:
        """Draw a number from 1 to 4."""
        return rng.randint(1, 4)

    def simpler(self, value: int) -> Iterator[int]:
        """Yield one output."""
        if value > 1:
            yield 1

    def text(self, value: int) -> str:
        """Return the number of outputs."""
        return (
            f"only the last {value} outputs are computed" if value > 1 else "only the last output is computed"
        )

    def change(self, question: Question, value: int, exam: Examination) -> None:
        """Compare outputs only, because the gradients are those of other outputs."""
        question.gradients = False

    def arguments(self, call: Call, model: nn.Module, value: int, exam: Examination) -> dict[str, Any]:
        """Ask for the last outputs, and compare them alone."""
        first = max(0, call.inputs.shape[1] - value)
        for place in call.places:
            call.compare_only(place, torch.arange(place.start, place.end) >= first)
        return {_name(exam): value}

    def restore(self, output: Tensor, call: Call, value: int) -> Tensor:
        """Put zeros in place of the outputs that are missing.

        If the model returns more outputs than requested, keep the first ones. They belong to other positions,
        so that the comparison fails.
        """
        width = call.inputs.shape[1]
        output = output[:, : min(value, width)]
        return F.pad(output, (0, 0, width - output.shape[1], 0))


def _name(exam: Examination) -> str:
    return next((name for name in _NAMES if accepts(exam.base, name)), "")

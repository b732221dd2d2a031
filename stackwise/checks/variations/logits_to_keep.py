"""Logits to keep: only the last outputs of each row are computed."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.checks.engine.call import accepts
from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call
from stackwise.checks.engine.variation import Need, Variation

_NAMES = ("logits_to_keep", "num_logits_to_keep")


class LogitsToKeep(Variation):
    """Ask for the last outputs only. Value: their number."""

    name = "logits_to_keep"
    question = "Are the last outputs the same if only these are computed?"
    rank = 49
    needs = (
        Need(f"needs a parameter {_NAMES[0]}", lambda exam: bool(_name(exam)) and exam.spec.per_position),
    )
    choices, simplest = (1, 2, 3, 4), 1
    words = "only the last logits are computed: logits_to_keep={}"
    sets: ClassVar[dict[str, bool]] = {"gradients": False}  # those of other outputs differ
    # Each part of a cached call would have its own last outputs.
    excludes = frozenset({"cache_parts", "static_cache", "turns", "cache_operations", "padded_prompt"})
    excludes |= {"labels", "recomputation"}
    advice = (
        "Look for a slice of the hidden states at the wrong end, or of the wrong length, and for an argument "
        "that has no effect."
    )

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

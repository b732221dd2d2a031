"""Hidden tokens: inputs that a position may not see do not change its output."""

from __future__ import annotations

import random
from typing import ClassVar

import torch
from torch import Tensor

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call
from stackwise.checks.engine.variation import PER_POSITION, Need, Variation


class HiddenTokens(Variation):
    """Replace the inputs of the first sequence that one position may not see.

    Value: the place of this position, from 0.0 (the first) to 1.0 (the last).
    """

    name = "hidden_tokens"
    question = "Does an input change only the outputs of positions that may see it?"
    rank = 28
    needs = (
        PER_POSITION,
        Need("needs visible=: inputs -> bool (T, T)", lambda exam: exam.spec.visible is not None),
    )
    words = "inputs that are hidden from a position are replaced"
    sets: ClassVar[dict[str, bool]] = {"gradients": False}  # those of replaced inputs differ
    excludes = frozenset({"labels", "recomputation"})
    advice = "Look for a mask that shows too much, and for norms, convolutions and pooling over positions."

    def draw(self, exam: Examination, rng: random.Random) -> float:
        """Draw a place."""
        return round(rng.random(), 2)

    def edit(self, call: Call, value: float, exam: Examination) -> None:
        """Replace the inputs."""
        place = call.places[0]
        sequence = exam.sequence(*place.sequence)
        reached = _reaching(_visible(exam, sequence)).to(sequence.device)
        hidden = ~reached[round(value * (len(sequence) - 1))]
        row = call.inputs[place.row, place.start : place.end]
        row[hidden] = exam.unlike(row, exam.filler(1, len(sequence))[0])[hidden]
        call.compare_only(place, ~(reached & hidden).any(dim=1))


def _visible(exam: Examination, sequence: Tensor) -> Tensor:
    """Return which position may see which, (T, T)."""
    assert exam.spec.visible is not None
    visible = exam.spec.visible(sequence[None])
    return (visible[0] if visible.ndim == 3 else visible).bool()


def _reaching(visible: Tensor) -> Tensor:
    """Return which position is reached by which, (T, T), in any number of layers."""
    reached = visible | torch.eye(len(visible), dtype=torch.bool, device=visible.device)
    for _ in range(len(visible).bit_length()):  # each step doubles the number of layers
        reached = (reached.float() @ reached.float()) > 0
    return reached

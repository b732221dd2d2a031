"""Positions: the position of each token is passed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call
from stackwise.checks.engine.variation import POSITIONS, Switch


class Positions(Switch):
    """Pass `position_ids`, as the model counts them."""

    name = "positions"
    question = "Do position_ids give the same output as the positions that the model counts?"
    words = "position_ids are passed"
    rank = 45
    needs = (POSITIONS,)
    advice = "Look for a part of the model that ignores position_ids and counts positions itself."

    def arguments(self, call: Call, model: nn.Module, value: bool, exam: Examination) -> dict[str, Any]:
        """Return the positions."""
        return {"position_ids": counted_positions(call, exam)}


def counted_positions(call: Call, exam: Examination) -> Tensor:
    """Return positions (B, W) that count from the model's first position at the start of each sequence."""
    positions = torch.zeros(call.inputs.shape[:2], dtype=torch.long, device=call.inputs.device)
    width = positions.shape[1]
    for place in call.places:
        # Later tokens go on counting.
        positions[place.row, place.start :] = torch.arange(width - place.start)
    return positions + exam.first_position

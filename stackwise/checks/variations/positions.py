"""Positions: the position of each token is passed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call
from stackwise.checks.engine.variation import POSITIONS, Need, Switch, Variation

_SHIFTS = (1, 5, 16, 37)


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


class ShiftedPositions(Variation):
    """Pass `position_ids` that do not start at the first position. Value: the shift.

    It applies to models whose plain output does not depend on the shift.
    """

    name = "shifted_positions"
    question = "Is the output of a model with relative positions the same if position_ids are shifted?"
    rank = 46
    needs = (
        POSITIONS,
        Need(
            "the model has absolute positions: a shift changes its output",
            lambda exam: all(exam.agrees_at(exam.first_position + shift) for shift in _shifts(exam)),
        ),
    )
    no_values = "needs a model that takes longer sequences"
    simplest = 1
    words = "all position_ids are larger by {}"
    explained_by = frozenset({"positions"})
    advice = (
        "Look for a part of the model that counts positions itself although position_ids are passed, such as "
        "the length of the cache, and for a mask that is computed from position_ids."
    )

    def values(self, exam: Examination) -> list[int]:
        """Return the shifts for which the model is long enough."""
        return _shifts(exam)

    def edit(self, call: Call, value: int, exam: Examination) -> None:
        """Shift the positions, whether this variation or a function of the spec passes them."""
        call.transforms.append(partial(_shifted, shift=value))

    def arguments(self, call: Call, model: nn.Module, value: int, exam: Examination) -> dict[str, Any]:
        """Return the positions that are shifted, unless a function of the spec passes others."""
        return {"position_ids": counted_positions(call, exam)}


def _shifted(arguments: dict[str, Any], _: int, *, shift: int) -> dict[str, Any]:
    return {**arguments, "position_ids": arguments["position_ids"] + shift}


def _shifts(exam: Examination) -> list[int]:
    room = max(_SHIFTS) if exam.spec.max_length is None else exam.spec.max_length - exam.longest
    return [shift for shift in _SHIFTS if shift <= room]

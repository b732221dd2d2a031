"""Shifted positions: a constant is added to all positions."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call
from stackwise.checks.engine.variation import POSITIONS, Need, Variation
from stackwise.checks.variations.positions import counted_positions

_SHIFTS = (1, 5, 16, 37)


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

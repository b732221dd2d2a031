"""Mask without positions: the padding mask is passed, and the model counts the positions."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from stackwise.checks.engine.call import accepts
from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call
from stackwise.checks.engine.variation import MASKED, Need, Refused, Switch


class MaskWithoutPositions(Switch):
    """Pass a padding mask without the `position_ids` that `masked` passes with it.

    Without padding on the left, a model counts the same positions.
    """

    name = "mask_without_positions"
    question = "Is the output the same if a padding mask is passed without position_ids?"
    words = "a padding mask is passed without position_ids"
    rank = 42
    needs = (
        MASKED,
        Need(
            "needs a masked that passes position_ids, and a model that also counts them",
            lambda exam: accepts(exam.base, "position_ids") and _passes_positions(exam),
        ),
    )
    sets: ClassVar[dict[str, bool]] = {"mask": True}
    includes = frozenset({"mask_of_ones"})
    excludes = frozenset({"positions", "shifted_positions"})
    advice = "Look for the code that counts positions from the mask, also from a mask that covers the cache."

    def edit(self, call: Call, value: bool, exam: Examination) -> None:
        """Remove the positions of each call."""
        if call.keep is None or (call.keep[:, 1:] & ~call.keep[:, :-1]).any():
            raise Refused("without position_ids, a token after padding has another position")
        call.transforms.append(_without_positions)


def _without_positions(arguments: dict[str, Any], _: int) -> dict[str, Any]:
    if arguments.get("position_ids") is None:
        raise Refused("no position_ids are passed")
    return {name: value for name, value in arguments.items() if name != "position_ids"}


def _passes_positions(exam: Examination) -> bool:
    inputs = exam.plain_inputs
    keep = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
    return exam.runs(Call(inputs, keep=keep, transforms=[_without_positions]))

"""Mask of ones: a padding mask is passed although nothing is hidden."""

from __future__ import annotations

from typing import ClassVar

from stackwise.checks.engine.variation import MASKED, Switch


class MaskOfOnes(Switch):
    """Pass a mask that hides nothing."""

    name = "mask_of_ones"
    question = "Is the output the same with a padding mask of ones as without a mask?"
    words = "a mask of ones is passed"
    rank = 35
    needs = (MASKED,)
    sets: ClassVar[dict[str, bool]] = {"mask": True}
    excludes = frozenset({"padded_rows"})  # it passes a mask already
    advice = (
        "Look for a branch that is taken if a mask is given, and that drops or replaces another argument."
    )

"""Recomputation: activations are computed again for the backward pass."""

from __future__ import annotations

from contextlib import suppress
from typing import ClassVar

from torch import nn

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.variation import TRAIN_MODE, Refused, Variation
from stackwise.checks.probe.recomputation import NoSwitch, by_its_own_switch, by_wrapping_layers, switched

_SWITCHES = {"switch": by_its_own_switch, "layers": by_wrapping_layers}


class Recomputation(Variation):
    """Recompute activations, in train mode with dropout off. Value: "switch" of the model, or "layers"."""

    name = "recomputation"
    question = "Are output and gradients the same if activations are recomputed?"
    rank = 70
    needs = (TRAIN_MODE,)
    no_values = "needs gradient_checkpointing_enable(), or layers that are called"
    words: ClassVar[dict[str, str]] = {
        "switch": "the model recomputes activations (by its own switch)",
        "layers": "the model recomputes activations (by torch.utils.checkpoint around each layer)",
    }
    sets: ClassVar[dict[str, bool]] = {"train": True, "gradients": True}
    single_checks = ("recompute_gradients",)
    excludes = includes = frozenset({"train_mode"})
    advice = (
        "Look for tensors that reach the recomputed part by an attribute or a closure, for arguments that "
        "are left out, and for state that each call changes (counters, caches)."
    )

    def values(self, exam: Examination) -> list[str]:
        """Return the model's own switch if it has one."""
        for name, switch in _SWITCHES.items():
            with suppress(NoSwitch):
                switched(exam.model(), switch)
                return [name]
        return []

    def correct_if(self, exam: Examination, value: str) -> str | None:
        """Only a model with its own switch promises that it works."""
        return None if value == "switch" else "the model is never trained with recomputation"

    def prepare(self, model: nn.Module, value: str, exam: Examination) -> nn.Module:
        """Switch it on."""
        try:
            switched(model, _SWITCHES[value])
        except NoSwitch as error:
            raise Refused("the model has no such switch") from error
        return model

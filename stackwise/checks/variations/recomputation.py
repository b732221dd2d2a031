"""Recomputation: activations are computed again for the backward pass."""

from __future__ import annotations

import random

from torch import nn

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Question
from stackwise.checks.engine.variation import Refused, Variation
from stackwise.checks.probe.recomputation import NoSwitch, by_its_own_switch, by_wrapping_layers, switched


class Recomputation(Variation):
    """Recompute activations, in train mode with dropout off. Value: "switch" of the model, or "layers"."""

    name = "recomputation"
    question = "Are output and gradients the same if activations are recomputed?"
    rank = 70
    single_checks = ("recompute_gradients",)
    excludes = includes = frozenset({"train_mode"})
    advice = (
        "Look for tensors that reach the recomputed part by an attribute or a closure, for arguments that "
        "are left out, and for state that each call changes (counters, caches)."
    )

    def missing(self, exam: Examination) -> str:
        """Require a switch or layers, and a model that repeats itself in train mode."""
        if not exam.has_train_mode:
            return "needs a train mode that is random only by dropout, and without batch statistics"
        return "" if _way(exam) else "needs gradient_checkpointing_enable(), or layers that are called"

    def draw(self, exam: Examination, rng: random.Random) -> str:
        """Return the model's own switch if it has one."""
        return _way(exam)

    def text(self, value: str) -> str:
        """Return the variation in words."""
        how = "by its own switch" if value == "switch" else "by torch.utils.checkpoint around each layer"
        return f"the model recomputes activations ({how})"

    def correct_if(self, exam: Examination, value: str) -> str | None:
        """Only a model with its own switch promises that it works."""
        return None if value == "switch" else "the model is never trained with recomputation"

    def change(self, question: Question, value: str, exam: Examination) -> None:
        """Ask in train mode with gradients."""
        question.train = question.gradients = True

    def prepare(self, model: nn.Module, value: str, exam: Examination) -> nn.Module:
        """Switch it on."""
        try:
            switched(model, by_its_own_switch if value == "switch" else by_wrapping_layers)
        except NoSwitch as error:
            raise Refused("the model has no such switch") from error
        return model


def _way(exam: Examination) -> str:
    for name, switch in (("switch", by_its_own_switch), ("layers", by_wrapping_layers)):
        try:
            switched(exam.model(), switch)
        except NoSwitch:
            continue
        return name
    return ""

"""Extra outputs: the model also returns hidden states, attention weights or a cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from torch import nn

from stackwise.checks.engine.call import accepts
from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call, Question
from stackwise.checks.engine.variation import Need, Variation

_SWITCHES = ("use_cache", "output_hidden_states", "output_attentions")


class ExtraOutputs(Variation):
    """Set switches of the output. Value: the value of each switch."""

    name = "extra_outputs"
    question = "Is the output the same if a cache, hidden states or attention weights are returned too?"
    rank = 50
    needs = (Need(f"needs a parameter {', '.join(_SWITCHES)}", lambda exam: _switches(exam)),)
    excludes = frozenset({"cache_parts"})
    advice = (
        "Look for another attention function or another branch if weights, states or a cache are returned."
    )

    def draw(self, exam: Examination, rng: random.Random) -> dict[str, bool]:
        """Draw one or more switches."""
        names = _switches(exam)
        chosen = rng.sample(names, rng.randint(1, len(names)))
        return {name: name != "use_cache" or rng.random() < 0.7 for name in sorted(chosen)}

    def simpler(self, value: dict[str, bool]) -> Iterator[dict[str, bool]]:
        """Yield each switch alone."""
        if len(value) > 1:
            yield from ({name: each} for name, each in value.items())

    def text(self, value: dict[str, bool]) -> str:
        """Return the switches."""
        return ", ".join(f"{name}={each}" for name, each in value.items()) + " is passed"

    def change(self, question: Question, value: dict[str, bool], exam: Examination) -> None:
        """Allow for eager attention, which returns attention weights and has a softmax in float32."""
        question.computes_in_float32 = question.computes_in_float32 or "output_attentions" in value

    def arguments(
        self, call: Call, model: nn.Module, value: dict[str, bool], exam: Examination
    ) -> dict[str, Any]:
        """Return the switches."""
        return dict(value)


def _switches(exam: Examination) -> list[str]:
    return [name for name in _SWITCHES if accepts(exam.base, name)]

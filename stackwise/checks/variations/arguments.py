"""Arguments: vectors in place of ids, fewer logits, or further outputs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stackwise.checks.engine.call import accepts
from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call, Question
from stackwise.checks.engine.variation import Need, Switch, Variation

_NAMES = ("logits_to_keep", "num_logits_to_keep")
_SWITCHES = ("use_cache", "output_hidden_states", "output_attentions")


class Embeddings(Switch):
    """Pass `inputs_embeds` in place of the ids."""

    name = "embeddings"
    question = "Do inputs_embeds give the same output as ids?"
    words = "inputs_embeds are passed in place of the ids"
    rank = 47
    needs = (
        Need(
            "needs a parameter inputs_embeds",
            lambda exam: exam.spec.inputs == "tokens" and accepts(exam.base, "inputs_embeds"),
        ),
        Need(
            "needs get_input_embeddings(), which returns the embedding",
            lambda exam: hasattr(exam.base, "get_input_embeddings"),
        ),
    )
    advice = "Look for a scale, a position or a dtype that only one of the two ways gets."

    def arguments(self, call: Call, model: nn.Module, value: bool, exam: Examination) -> dict[str, Any]:
        """Return the vectors."""
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        return {"inputs_embeds": embedding(call.inputs)}


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

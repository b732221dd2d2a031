"""Embeddings: the vectors of the tokens in place of their ids."""

from __future__ import annotations

from typing import Any

from torch import nn

from stackwise.checks.engine.call import accepts
from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Call
from stackwise.checks.engine.variation import Need, Switch


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

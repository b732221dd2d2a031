"""Copies: a copy of the model, or another model that loads its weights."""

from __future__ import annotations

import copy
import pickle
import random

from torch import nn

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.variation import Refused, Variation
from stackwise.checks.probe.call import dtype_of


class Copies(Variation):
    """Ask a copy of the model. Value: "state_dict", "deepcopy" or "pickle"."""

    name = "copies"
    question = "Does a copy of the model give the same output?"
    rank = 65
    single_checks = ("load_round_trip",)
    advice = (
        "Look for tensors that are neither parameters nor buffers, and for references to the first model."
    )

    def draw(self, exam: Examination, rng: random.Random) -> str:
        """Draw a way."""
        return rng.choice(("state_dict", "deepcopy", "pickle"))

    def text(self, value: str) -> str:
        """Return the variation in words."""
        if value == "state_dict":
            return "its state_dict is loaded into a new model"
        return f"the model is copied with {value}"

    def prepare(self, model: nn.Module, value: str, exam: Examination) -> nn.Module:
        """Copy the model."""
        if value == "deepcopy":
            return copy.deepcopy(model)
        if value == "pickle":
            try:
                data = pickle.dumps(model)
            except Exception as error:
                raise Refused("the model cannot be pickled") from error
            other: nn.Module = pickle.loads(data)  # noqa: S301  made in the line above
            return other
        # Built with another seed, so that a weight that is not saved differs.
        other = exam.spec.create(exam.subject.device, exam.subject.seed + 1).to(dtype_of(model)).eval()
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        return other

"""Labels: the model's own loss, and its gradient."""

from __future__ import annotations

import random
from collections.abc import Iterator

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Question
from stackwise.checks.engine.variation import Variation


class Labels(Variation):
    """Ask for the loss instead of the outputs. Value: share of the labels that are ignored."""

    name = "labels"
    question = (
        "Is the model's loss the mean negative log likelihood, and its gradient the derivative of this mean?"
    )
    rank = 32
    single_checks = ("loss_formula", "label_shift", "loss_reduction", "ignored_labels")
    excludes = frozenset({"cache_parts"})
    advice = (
        "The loss should be the mean negative log likelihood of the labels that are not -100, and its "
        "gradient the derivative of this mean. Without labels, the gradient should be zero."
    )

    def missing(self, exam: Examination) -> str:
        """Require the model's own loss of tokens."""
        if exam.spec.labelled_loss is None or exam.spec.inputs != "tokens" or not exam.spec.per_position:
            return "needs labelled_loss: (model, inputs, labels) -> the model's own loss"
        return ""

    def draw(self, exam: Examination, rng: random.Random) -> float:
        """Draw a share."""
        return rng.choice((0.0, 0.3, 0.6, 1.0))

    def simpler(self, value: float) -> Iterator[float]:
        """Yield no ignored labels."""
        if value:
            yield 0.0

    def text(self, value: float) -> str:
        """Return the share."""
        return f"the model computes its own loss with {value:.0%} of the labels ignored"

    def change(self, question: Question, value: float, exam: Examination) -> None:
        """Ask for the loss and its gradients."""
        question.ignored, question.gradients = value, True

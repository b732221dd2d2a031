"""Labels: the model's own loss, and its gradient."""

from __future__ import annotations

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Question
from stackwise.checks.engine.variation import Need, Variation


class Labels(Variation):
    """Ask for the loss instead of the outputs. Value: share of the labels that are ignored."""

    name = "labels"
    question = (
        "Is the model's loss the mean negative log likelihood, and its gradient the derivative of this mean?"
    )
    rank = 32
    needs = (
        Need(
            "needs labelled_loss: (model, inputs, labels) -> the model's own loss",
            lambda exam: exam.spec.labelled_loss and exam.spec.inputs == "tokens" and exam.spec.per_position,
        ),
    )
    choices, simplest = (0.0, 0.3, 0.6, 1.0), 0.0
    words = "the model computes its own loss with {:.0%} of the labels ignored"
    single_checks = ("loss_formula", "label_shift", "loss_reduction", "ignored_labels")
    excludes = frozenset({"cache_parts"})
    advice = (
        "The loss should be the mean negative log likelihood of the labels that are not -100, and its "
        "gradient the derivative of this mean. Without labels, the gradient should be zero."
    )

    def change(self, question: Question, value: float, exam: Examination) -> None:
        """Ask for the loss and its gradients."""
        question.ignored, question.gradients = value, True

"""Train mode: the model is in train mode, with dropout switched off."""

from __future__ import annotations

from stackwise.checks.engine.examination import Examination
from stackwise.checks.engine.question import Question
from stackwise.checks.engine.variation import Switch


class TrainMode(Switch):
    """Ask in train mode, with dropout off."""

    name = "train_mode"
    question = "Is the output the same in train mode, apart from dropout?"
    words = "the model is in train mode (dropout off)"
    rank = 55
    advice = "Look for branches on self.training, and for weights that train() and eval() change."

    def missing(self, exam: Examination) -> str:
        """Require a model that repeats itself in train mode."""
        if exam.has_train_mode:
            return ""
        return "needs a train mode that is random only by dropout, and without batch statistics"

    def change(self, question: Question, value: bool, exam: Examination) -> None:
        """Switch to train mode."""
        question.train = True

"""Multiple choice: questions with choices that a model ranks by their probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stackwise.quality.proportion import Proportion
from stackwise.quality.request import Request
from stackwise.quality.scoring import Scorer
from stackwise.support.arguments import check_sizes, require

__all__ = ["MultipleChoiceResult", "Question", "score_questions"]

NORMS = ("sum", "characters", "bytes")


@dataclass(frozen=True)
class Question:
    """Context, possible continuations and the index of the correct one.

    Attributes:
        context: text before the choices, including examples.
        choices: at least two choices.
        answer: index of the correct choice, from 0.
        subject: subject of the question, for results by subject. "": none.
        separator: text between context and choice. It is scored with the choice, but is not part of its
            length.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    subject: str = ""
    separator: str = " "

    def __post_init__(self) -> None:
        require(len(self.choices) > 1, "choices", self.choices, "at least two")
        require(all(self.choices), "choices", self.choices, "no empty one")
        check_sizes(0, answer=self.answer)
        require(self.answer < len(self.choices), "answer", self.answer, f"0 to {len(self.choices) - 1}")

    @property
    def requests(self) -> list[Request]:
        """One request per choice."""
        return [Request(self.context, self.separator + choice) for choice in self.choices]


@dataclass(frozen=True)
class MultipleChoiceResult:
    """Scores of all choices.

    Attributes:
        questions: scored questions.
        log_probabilities: log-probabilities of the choices of each question.
        cut: number of context tokens that were cut because sequences were too long.
        subjects_of: groups of subjects with their names, for results by group.
        norm: norm of the reported accuracy: "sum", "characters" or "bytes", see `accuracy`.
    """

    questions: tuple[Question, ...]
    log_probabilities: tuple[tuple[float, ...], ...]
    cut: int = 0
    subjects_of: tuple[tuple[str, tuple[str, ...]], ...] = ()
    norm: str = "sum"

    def correct(self, norm: str = "sum") -> np.ndarray:
        """Return bool (questions,): True if the most likely choice is the answer.

        At a tie, the first choice counts.

        Args:
            norm: "sum": log-probability of the choice. "characters" or "bytes": the same per character or
                UTF-8 byte of the choice, so that short choices are not preferred.

        Raises:
            ValueError: the norm is unknown.
        """
        require(norm in NORMS, "norm", norm, ", ".join(map(repr, NORMS)))
        chosen = []
        for question, scores in zip(self.questions, self.log_probabilities, strict=True):
            sizes = {
                "sum": [1] * len(scores),
                "characters": [len(choice) for choice in question.choices],
                "bytes": [len(choice.encode()) for choice in question.choices],
            }[norm]
            chosen.append(int(np.argmax(np.array(scores) / np.array(sizes, dtype=float))))
        return np.array([c == q.answer for c, q in zip(chosen, self.questions, strict=True)], dtype=bool)

    def accuracy(self, norm: str = "sum") -> Proportion:
        """Return the share of correct answers: `acc` of the harness or, for "characters", `acc_norm`."""
        return Proportion.of(self.correct(norm))

    def by_subject(self, norm: str = "sum") -> dict[str, Proportion]:
        """Return the accuracy of each subject."""
        correct = self.correct(norm)
        subjects = np.array([question.subject for question in self.questions])
        return {str(each): Proportion.of(correct[subjects == each]) for each in np.unique(subjects)}

    def by_group(self, norm: str = "sum") -> dict[str, Proportion]:
        """Return the accuracy of each group. Each question has the same weight."""
        correct = self.correct(norm)
        found = {}
        for name, subjects in self.subjects_of:
            inside = np.array([question.subject in subjects for question in self.questions])
            if inside.any():
                found[name] = Proportion.of(correct[inside])
        return found

    @property
    def figure(self) -> Proportion:
        """Reported accuracy of the task."""
        return self.accuracy(self.norm)

    @property
    def metric(self) -> str:
        """Name of the reported accuracy."""
        return {"sum": "acc", "characters": "acc_norm", "bytes": "acc_bytes"}[self.norm]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        found: dict[str, Any] = {
            "metric": self.metric,
            "questions": len(self.questions),
            "acc": self.accuracy().to_dict(),
            "acc_norm": self.accuracy("characters").to_dict(),
            "acc_bytes": self.accuracy("bytes").to_dict(),
            "cut_tokens": self.cut,
        }
        groups, subjects = self.by_group(self.norm), self.by_subject(self.norm)
        if groups:
            found["groups"] = {name: each.to_dict() for name, each in groups.items()}
        if set(subjects) != {""}:
            found["subjects"] = {name: each.to_dict() for name, each in subjects.items()}
        return found


def score_questions(
    scorer: Scorer,
    questions: Sequence[Question],
    *,
    norm: str = "sum",
    subjects_of: tuple[tuple[str, tuple[str, ...]], ...] = (),
) -> MultipleChoiceResult:
    """Score the choices of all questions.

    Raises:
        ValueError: no questions, an unknown norm, or an error of `Scorer.score`.
    """
    require(len(questions) > 0, "questions", len(questions), "at least one")
    require(norm in NORMS, "norm", norm, ", ".join(map(repr, NORMS)))
    scores = iter(scorer.score([request for question in questions for request in question.requests]))
    by_question = [[next(scores) for _ in question.choices] for question in questions]
    return MultipleChoiceResult(
        tuple(questions),
        tuple(tuple(score.log_probability for score in each) for each in by_question),
        sum(score.cut for each in by_question for score in each),
        subjects_of,
        norm,
    )

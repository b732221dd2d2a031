"""Multiple choice: questions whose choices a model is asked to rank."""

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
    """A context, what may follow it, and what does.

    Attributes:
        context: all that is before the choices, examples included.
        choices: at least two.
        answer: which of them is right, from 0.
        subject: what it is about, where a result is to be told by subjects; "" otherwise.
        separator: what stands between context and choice; it is scored with the choice and does not count as
            one of its characters.
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
        """One for each choice."""
        return [Request(self.context, self.separator + choice) for choice in self.choices]


@dataclass(frozen=True)
class MultipleChoiceResult:
    """What a model chose.

    Attributes:
        questions: as they were asked.
        log_probabilities: of each, those of its choices.
        cut: how many tokens of contexts were left out for want of room.
        subjects_of: groups of subjects that are told as well, by name.
        norm: what its figure is: "sum", "characters" or "bytes", see `accuracy`.
    """

    questions: tuple[Question, ...]
    log_probabilities: tuple[tuple[float, ...], ...]
    cut: int = 0
    subjects_of: tuple[tuple[str, tuple[str, ...]], ...] = ()
    norm: str = "sum"

    def correct(self, norm: str = "sum") -> np.ndarray:
        """bool (questions,): where the most likely choice, the first of those that tie, is the answer.

        Args:
            norm: "sum": the log-probability of the whole choice; "characters" or "bytes": the same for each
                character or UTF-8 byte of it, so that short choices are not preferred.

        Raises:
            ValueError: another norm.
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
        """The share of right answers: `acc` of the harness, by characters its `acc_norm`."""
        return Proportion.of(self.correct(norm))

    def by_subject(self, norm: str = "sum") -> dict[str, Proportion]:
        """The same of each subject."""
        correct = self.correct(norm)
        subjects = np.array([question.subject for question in self.questions])
        return {str(each): Proportion.of(correct[subjects == each]) for each in np.unique(subjects)}

    def by_group(self, norm: str = "sum") -> dict[str, Proportion]:
        """The same of each group, in which every question counts alike: subjects weigh what their size is."""
        correct = self.correct(norm)
        found = {}
        for name, subjects in self.subjects_of:
            inside = np.array([question.subject in subjects for question in self.questions])
            if inside.any():
                found[name] = Proportion.of(correct[inside])
        return found

    @property
    def figure(self) -> Proportion:
        """The accuracy that is reported of this task."""
        return self.accuracy(self.norm)

    @property
    def metric(self) -> str:
        """What the figure is called."""
        return {"sum": "acc", "characters": "acc_norm", "bytes": "acc_bytes"}[self.norm]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
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
    """Ask a model all of them.

    Raises:
        ValueError: no question, or as `Scorer.score` does.
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

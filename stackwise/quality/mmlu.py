"""MMLU: questions of 57 subjects with four lettered choices, after examples of the same subject."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stackwise.quality.multiple_choice import Question
from stackwise.quality.task_file import in_place, index_of, text_of, texts_of
from stackwise.support.arguments import check_sizes, require

__all__ = ["SUBJECTS", "mmlu_questions"]

LETTERS = "ABCD"
# Subjects by group. Results are reported per group.
SUBJECTS: dict[str, tuple[str, ...]] = {
    "stem": (
        "abstract_algebra",
        "anatomy",
        "astronomy",
        "college_biology",
        "college_chemistry",
        "college_computer_science",
        "college_mathematics",
        "college_physics",
        "computer_security",
        "conceptual_physics",
        "electrical_engineering",
        "elementary_mathematics",
        "high_school_biology",
        "high_school_chemistry",
        "high_school_computer_science",
        "high_school_mathematics",
        "high_school_physics",
        "high_school_statistics",
        "machine_learning",
    ),
    "other": (
        "business_ethics",
        "clinical_knowledge",
        "college_medicine",
        "global_facts",
        "human_aging",
        "management",
        "marketing",
        "medical_genetics",
        "miscellaneous",
        "nutrition",
        "professional_accounting",
        "professional_medicine",
        "virology",
    ),
    "social_sciences": (
        "econometrics",
        "high_school_geography",
        "high_school_government_and_politics",
        "high_school_macroeconomics",
        "high_school_microeconomics",
        "high_school_psychology",
        "human_sexuality",
        "professional_psychology",
        "public_relations",
        "security_studies",
        "sociology",
        "us_foreign_policy",
    ),
    "humanities": (
        "formal_logic",
        "high_school_european_history",
        "high_school_us_history",
        "high_school_world_history",
        "international_law",
        "jurisprudence",
        "logical_fallacies",
        "moral_disputes",
        "moral_scenarios",
        "philosophy",
        "prehistory",
        "professional_law",
        "world_religions",
    ),
}


def mmlu_questions(
    rows: Iterable[Mapping[str, Any]], examples: Iterable[Mapping[str, Any]] = (), *, shots: int = 5
) -> list[Question]:
    """Return the questions in the format of the harness.

    The context consists of a line with the subject, the first `shots` examples of the subject with their
    answers, the question, its lettered choices, and "Answer:". The scored texts are
    " A", " B", " C" and " D".

    Args:
        rows: rows of the split "test" with `question`, four `choices`, `answer` (0 to 3, or the letter),
            `subject`.
        examples: rows of the split "dev", in their order.
        shots: number of examples in the context. 0: none.

    Raises:
        ValueError: a row without one of these keys, or a subject with too few examples. The message has the
            index and the question of the row.
    """
    check_sizes(0, shots=shots)
    shown: dict[str, list[str]] = {}
    if shots:
        for i, row in enumerate(examples):
            with in_place(f"examples[{i}], {row.get('question')!r:.60}"):
                subject, text, answer = _read(row)
            shown.setdefault(subject, []).append(f"{text} {LETTERS[answer]}\n\n")
    questions = []
    for i, row in enumerate(rows):
        with in_place(f"rows[{i}], {row.get('question')!r:.60}"):
            subject, text, answer = _read(row)
        some = shown.get(subject, [])[:shots]
        allowed = f"at most {len(some)}, as many as the split dev has of {subject!r}"
        require(len(some) == shots, "shots", shots, allowed)
        about = subject.replace("_", " ")
        intro = f"The following are multiple choice questions (with answers) about {about}.\n\n"
        questions.append(Question(intro + "".join(some) + text, tuple(LETTERS), answer, subject))
    return questions


def _read(row: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return the subject of a row, its question with choices and "Answer:", and the index of the answer."""
    for key in ("question", "choices", "answer", "subject"):
        require(key in row, "row", sorted(row), f"one with {key!r}, as MMLU has it")
    choices, question, subject = texts_of(row, "choices"), text_of(row, "question"), text_of(row, "subject")
    require(len(choices) == len(LETTERS), "choices", len(choices), f"{len(LETTERS)}, as MMLU has")
    said = row["answer"]
    if isinstance(said, str):
        require(said in (*LETTERS, *"0123"), "answer", said, "A to D, or 0 to 3")
        answer = LETTERS.index(said) if said in LETTERS else int(said)
    else:
        answer = index_of(row, "answer")
        require(answer in range(len(LETTERS)), "answer", answer, "0 to 3")
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    return subject, "\n".join([question.strip(), *lines, "Answer:"]), answer

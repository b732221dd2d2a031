"""HellaSwag: four ways in which a short text may go on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from stackwise.quality.multiple_choice import Question
from stackwise.quality.task_file import in_place, text_of, texts_of
from stackwise.support.arguments import require

__all__ = ["clean_text", "hellaswag_questions"]

_KEYS = ("activity_label", "ctx_a", "ctx_b", "endings", "label")
_BRACKETS = re.compile(r"\[.*?\]")


def clean_text(text: str) -> str:
    """A text without the marks that WikiHow's pages left in it, as the harness cleans it.

    " [title]" becomes ". ", other brackets go with what is in them, two spaces become one.
    """
    text = text.strip().replace(" [title]", ". ")
    return _BRACKETS.sub("", text).replace("  ", " ")


def hellaswag_questions(rows: Iterable[Mapping[str, Any]]) -> list[Question]:
    """The questions as the harness puts them: the activity, a colon, both parts of the context.

    Args:
        rows: of the split "validation": `activity_label`, `ctx_a`, `ctx_b`, four `endings`, `label` (an
            integer or its digits).

    Raises:
        ValueError: a row without one of these, or without a label, as in the split "test"; with its place and
            context.
    """
    questions = []
    for i, row in enumerate(rows):
        with in_place(f"rows[{i}], {row.get('ctx_a')!r:.60}"):
            questions.append(_read(row))
    return questions


def _read(row: Mapping[str, Any]) -> Question:
    for key in _KEYS:
        require(key in row, "row", sorted(row), f"one with {key!r}, as HellaSwag has it")
    activity, first, second = (text_of(row, key) for key in _KEYS[:3])
    endings, label = texts_of(row, "endings"), str(row["label"])
    allowed = "the number of an ending; the split test has none, use validation"
    require(label.isdecimal() and int(label) < len(endings), "label", row["label"], allowed)
    context = f"{activity}: {first} {second.capitalize()}"
    return Question(clean_text(context), tuple(map(clean_text, endings)), int(label))

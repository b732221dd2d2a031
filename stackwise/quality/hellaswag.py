"""HellaSwag: questions with four possible endings of a short text."""

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
    """Return a text without the markup of WikiHow's pages, cleaned like in the harness.

    " [title]" becomes ". ", other brackets are removed with their content, and double spaces become single
    ones.
    """
    text = text.strip().replace(" [title]", ". ")
    return _BRACKETS.sub("", text).replace("  ", " ")


def hellaswag_questions(rows: Iterable[Mapping[str, Any]]) -> list[Question]:
    """Return the questions in the format of the harness: activity, colon, both parts of the context.

    Args:
        rows: rows of the split "validation" with `activity_label`, `ctx_a`, `ctx_b`, four `endings`, and
            `label` (an integer or its digits).

    Raises:
        ValueError: a row without one of these keys, or without a label, as in the split "test". The message
            has the index and the context of the row.
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

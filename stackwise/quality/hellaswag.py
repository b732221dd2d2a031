"""HellaSwag: four ways in which a short text may go on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from stackwise.argument import require
from stackwise.quality.multiple_choice import Question

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
        ValueError: a row without one of these, or without a label, as in the split "test".
    """
    questions = []
    for row in rows:
        for key in _KEYS:
            require(key in row, "row", sorted(row), f"one with {key!r}, as HellaSwag has it")
        label = str(row["label"])
        allowed = "the number of an ending; the split test has none, use validation"
        require(label.isdecimal() and int(label) < len(row["endings"]), "label", row["label"], allowed)
        context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        endings = tuple(clean_text(ending) for ending in row["endings"])
        questions.append(Question(clean_text(context), endings, int(label)))
    return questions

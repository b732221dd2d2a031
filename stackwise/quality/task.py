"""Task: named task for a model: MMLU, HellaSwag or a user-defined file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from stackwise.quality.cloze import ClozeResult, score_cloze
from stackwise.quality.hellaswag import hellaswag_questions
from stackwise.quality.mmlu import SUBJECTS, mmlu_questions
from stackwise.quality.multiple_choice import MultipleChoiceResult, Question, score_questions
from stackwise.quality.perplexity import PerplexityResult, score_texts
from stackwise.quality.request import Request
from stackwise.quality.scoring import Scorer
from stackwise.quality.task_file import Dataset, Row, in_place, read_rows, text_of, texts_of
from stackwise.support.arguments import check_sizes, require

__all__ = ["Task", "TaskResult", "cut_note", "load_task", "load_tasks"]

TaskResult = MultipleChoiceResult | ClozeResult | PerplexityResult
MMLU = Dataset("mmlu", "cais/mmlu", "all", {"test": ("test",), "dev": ("dev",)})
HELLASWAG = Dataset("hellaswag", "Rowan/hellaswag", None, {"validation": ("validation", "val")})
MMLU_SHOTS = 5
T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """Task with its data, for any model.

    Attributes:
        name: name in reports.
        examples: number of questions or texts.
        run: function that returns the result of a Scorer.
        is_cost: True if the metric is bits per byte, and False if it is a share of correct answers.
    """

    name: str
    examples: int
    run: Callable[[Scorer], TaskResult]
    is_cost: bool = False


def cut_note(task: str, result: TaskResult) -> str | None:
    """Return a note about contexts that were cut. Return None if there are none."""
    if not result.cut:
        return None
    return f"{task}: {result.cut:,} tokens at the beginning of contexts were left out, for want of room"


def load_tasks(
    names: Iterable[str],
    folder: Path | None = None,
    *,
    shots: int | None = None,
    limit: int | None = None,
    context: int = 1,
) -> list[Task]:
    """Return the result of `load_task` for each name. Files with the same name are named by their path.

    Args:
        names: distinct names of tasks.
        folder: see `load_task`.
        shots: number of examples of MMLU. Requires "mmlu" in `names`.
        limit, context: see `load_task`.

    Raises:
        ValueError: no names, a repeated name, shots without MMLU, or an error of `load_task`.
    """
    names = list(names)
    require(len(names) > 0, "tasks", names, "at least one")
    require(len(set(names)) == len(names), "tasks", names, "each once")
    require(shots is None or "mmlu" in names, "shots", shots, "none, since only mmlu has examples")
    tasks = [
        load_task(name, folder, shots=shots if name == "mmlu" else None, limit=limit, context=context)
        for name in names
    ]
    counts = Counter(task.name for task in tasks)
    return [
        task if counts[task.name] == 1 else replace(task, name=name)
        for name, task in zip(names, tasks, strict=True)
    ]


def load_task(
    name: str,
    folder: Path | None = None,
    *,
    shots: int | None = None,
    limit: int | None = None,
    context: int = 1,
) -> Task:
    """Return a task with its data.

    Args:
        name: "mmlu", "hellaswag", or the path of a JSON Lines or Parquet file. Its rows have `context`,
            `choices` and `answer` (and `subject`), or `context` and `continuation`, or `text`.
        folder: folder with one subfolder of files per published data set. None: from Hugging Face.
        shots: number of examples in the context of MMLU. None: 5.
        limit: maximum number of rows, per subject if there are subjects. None: all.
        context: argument of `rolling_windows`, for texts.

    Raises:
        ValueError: the task is unknown, or rows have other keys.
        FileNotFoundError, ImportError: errors of `Dataset.rows` and `read_rows`.
    """
    if limit is not None:
        check_sizes(limit=limit)
    require(shots is None or name == "mmlu", f"shots of {name}", shots, "none: only mmlu has examples")
    if name == "mmlu":
        n_shots = MMLU_SHOTS if shots is None else shots
        rows = _limited(MMLU.rows("test", folder), limit)
        examples = MMLU.rows("dev", folder) if n_shots else []
        groups = tuple(SUBJECTS.items())
        return _choice_task(name, mmlu_questions(rows, examples, shots=n_shots), "sum", groups)
    if name == "hellaswag":
        rows = _limited(HELLASWAG.rows("validation", folder), limit)
        return _choice_task(name, hellaswag_questions(rows), "characters", ())
    if Path(name).suffix in (".jsonl", ".parquet"):
        return _of_file(Path(name), limit, context)
    raise ValueError(
        f"task: got {name!r}; allowed: 'mmlu', 'hellaswag', or a .jsonl or .parquet file "
        "(the harness knows more: --harness)"
    )


def _choice_task(
    name: str, questions: Sequence[Question], norm: str, groups: tuple[tuple[str, tuple[str, ...]], ...]
) -> Task:
    def run(scorer: Scorer) -> TaskResult:
        return score_questions(scorer, questions, norm=norm, subjects_of=groups)

    return Task(name, len(questions), run)


def _of_file(path: Path, limit: int | None, context: int) -> Task:
    """Return the task of a file. The kind depends on the keys of the rows."""
    rows = read_rows(path)
    require(len(rows) > 0, str(path), "no row", "at least one")
    places, name = _kept(rows, limit), path.stem

    def each(read: Callable[[Row], T]) -> list[T]:
        found = []
        for place in places:
            with in_place(f"{path}, row {place + 1}"):
                found.append(read(rows[place]))
        return found

    if "choices" in rows[0]:
        return _choice_task(name, each(_question), "sum", ())
    if "continuation" in rows[0]:
        requests = each(_request)
        return Task(name, len(requests), lambda scorer: score_cloze(scorer, requests))
    if "text" in rows[0]:
        texts = each(_text)
        return Task(name, len(texts), lambda scorer: score_texts(scorer, texts, context=context), True)
    raise ValueError(
        f"{path}: got rows with {', '.join(map(repr, rows[0]))}; allowed: context, choices and answer; "
        "context and continuation; or text"
    )


def _question(row: Row) -> Question:
    answer: Any = row.get("answer")
    subject = "" if row.get("subject") is None else str(row["subject"])
    choices = texts_of(row, "choices")
    # If all choices begin with a space, the separator replaces it.
    if all(choice.startswith(" ") for choice in choices):
        choices = tuple(choice[1:] for choice in choices)
    return Question(text_of(row, "context"), choices, answer, subject)


def _request(row: Row) -> Request:
    request = Request(text_of(row, "context"), text_of(row, "continuation"))
    require(request.continuation != "", "continuation", "", "a text that is not empty")
    return request


def _text(row: Row) -> str:
    text = text_of(row, "text")
    require(text != "", "text", "", "a text that is not empty")
    return text


def _limited(rows: list[Row], limit: int | None) -> list[Row]:
    return [rows[place] for place in _kept(rows, limit)]


def _kept(rows: list[Row], limit: int | None) -> list[int]:
    """Return the indices of the first rows of each subject."""
    counts: Counter[Any] = Counter()
    kept = []
    for place, row in enumerate(rows):
        subject = row.get("subject", "")
        counts[subject] += 1
        if limit is None or counts[subject] <= limit:
            kept.append(place)
    return kept

"""Row task: task of lm-evaluation-harness whose data are own rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stackwise.support.arguments import require
from stackwise.support.files import parse_json

__all__ = ["read_rows", "require_harness", "row_task"]


def row_task(name: str, rows: Iterable[Mapping[str, Any]], **settings: Any) -> Any:
    """Return a task of the harness whose data are these rows.

    Args:
        name: name of the task.
        rows: rows with the keys `context`, `choices` and `answer` (index of a choice); or `context` and
            `continuation`; or `text`. The choices follow a space, which is not added if all choices of
            a row begin with one. Other keys are ignored.
        **settings: further keys of the harness's task files, such as `target_delimiter=""` for choices that
            follow no space.

    Raises:
        ImportError: lm_eval is not installed.
        ValueError: no rows, or a row with other keys or values.
    """
    require_harness()
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    rows = list(rows)
    require(len(rows) > 0, "rows", len(rows), "at least one")
    keys = next((keys for keys in _KINDS if isinstance(rows[0], Mapping) and keys[0] in rows[0]), None)
    if keys is None:
        kinds = "; or ".join(", ".join(keys) for keys in _KINDS)
        raise ValueError(f"row 1: got {rows[0]!r:.100}; allowed: an object with {kinds}")
    checked = [_checked(row, keys, number) for number, row in enumerate(rows, 1)]
    for row in checked if "target_delimiter" not in settings else ():
        if all(choice.startswith(" ") for choice in row.get("choices", [""])):
            row["choices"] = [choice[1:] for choice in row["choices"]]  # the delimiter is this space
    data = Dataset.from_list(checked)

    class RowTask(ConfigurableTask):  # type: ignore[misc]  # lm_eval has no types
        """Task with given rows."""

        def download(self, *_: Any, **__: Any) -> None:
            self.dataset = {"test": data}

    return RowTask(
        config={"task": name, "test_split": "test", "num_fewshot": 0, **_KINDS[keys](), **settings}
    )


def _choice_settings() -> dict[str, Any]:
    mean = {"aggregation": "mean", "higher_is_better": True}
    return {
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": metric, **mean} for metric in ("acc", "acc_norm", "acc_bytes")],
    }


def _continuation_settings() -> dict[str, Any]:
    return {
        "output_type": "loglikelihood",
        "doc_to_text": "context",
        "doc_to_target": "continuation",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "perplexity", "aggregation": _perplexity, "higher_is_better": False},
        ],
    }


def _text_settings() -> dict[str, Any]:
    return {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [
            {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
            {"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False},
        ],
    }


# Settings by the keys of the rows. The first key tells the kind.
_KINDS = {
    ("choices", "context", "answer"): _choice_settings,
    ("continuation", "context"): _continuation_settings,
    ("text",): _text_settings,
}


def _perplexity(log_probabilities: Sequence[float]) -> float:
    """Return the exponential of the mean loss. It may be infinite, which is an error in the harness."""
    with np.errstate(over="ignore"):
        return float(np.exp(-np.mean(log_probabilities)))


def _checked(row: Mapping[str, Any], keys: Sequence[str], number: int) -> dict[str, Any]:
    """Return the values of a row under the keys.

    Raises:
        ValueError: a value is not allowed.
    """
    require(isinstance(row, Mapping), f"row {number}", row, f"an object with {', '.join(keys)}")
    found: dict[str, Any] = {key: row.get(key) for key in keys}
    for key, value in found.items():
        match key:
            case "choices":
                texts = value if isinstance(value, list | tuple) else []
                valid = len(texts) > 1 and all(isinstance(text, str) and text for text in texts)
                allowed = "at least two texts, none of them empty"
            case "answer":
                last = len(found["choices"]) - 1
                whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
                valid = whole and 0 <= int(value) <= last
                allowed = f"an integer, 0 to {last}"
            case _:
                valid = isinstance(value, str) and (value != "" or key == "context")
                allowed = "a text" if key == "context" else "a text that is not empty"
        require(valid, f"row {number}: {key}", value, allowed)
    return found


def read_rows(path: Path) -> list[Any]:
    """Return the rows of a JSON Lines or Parquet file."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        rows: list[Any] = parquet.read_table(path).to_pylist()
        return rows
    lines = enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
    found = []
    for number, line in lines:
        try:
            found += [parse_json(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"line {number}: no JSON: {error}") from None
    return found


def require_harness() -> None:
    """Raise ImportError if lm_eval is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"lm-evaluation-harness is not installed: pip install 'stackwise[quality]' ({error})"
        ) from error

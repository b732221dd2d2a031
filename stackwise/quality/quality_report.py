"""Quality report: results of the tasks as text, Markdown, JSON and HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stackwise.quality.human_eval import HumanEvalResult
from stackwise.report.page import Page, Row, Section, Table
from stackwise.support.files import write_whole
from stackwise.support.markdown import markdown_table

__all__ = ["Figure", "QualityReport"]


@dataclass(frozen=True)
class Figure:
    """Metric of a task.

    Attributes:
        task: name of the task or group.
        metric: name of the metric.
        value: value of the metric.
        standard_error: standard error of the value. None: unknown.
        examples: number of examples. None: unknown.
    """

    task: str
    metric: str
    value: float
    standard_error: float | None = None
    examples: int | None = None


@dataclass
class QualityReport:
    """Results of a model.

    Attributes:
        model: name of the model.
        notes: remarks on the evaluation.
        figures: metrics in the order of the tasks.
        results: results of each task, as plain values.
    """

    model: str
    notes: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)

    def add_human_eval(self, result: HumanEvalResult) -> None:
        """Add the result of programs: pass@k, with its interval in the notes."""
        self.results["human_eval"] = result.to_dict()
        self.notes += [f"human_eval: {line}" for line in str(result).splitlines()]
        for k, found in result.pass_at.items():
            self.figures.append(Figure("human_eval", f"pass@{k}", found.estimate, None, found.n_problems))

    def add_tasks(self, found: Mapping[str, Any]) -> None:
        """Add the result of `Tasks.run`. Tasks inside a group are in `results`, but have no figures."""
        groups = found.get("group_subtasks", {})
        inside = {name for names in groups.values() for name in names} - groups.keys()
        counts = found.get("n-samples", {})
        for task, results in found["results"].items():
            self.results[task] = dict(results)
            count = counts.get(task, {}).get("effective")
            for key, value in results.items() if task not in inside else ():
                metric, comma, _ = key.partition(",")
                if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                    continue
                error = results.get(key.replace(",", "_stderr,", 1))
                error = float(error) if isinstance(error, int | float) else None
                self.figures.append(Figure(task, metric, float(value), error, count))

    def lines(self) -> Iterator[str]:
        """Yield lines of plain text, for a terminal."""
        yield self.model
        yield from (f"  {note}" for note in self.notes)
        rows = self._rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()

    def markdown(self) -> str:
        """Return the report as Markdown, with a table of the metrics."""
        head, *rows = self._rows()
        notes = "".join(f"- {note}\n" for note in self.notes)
        return f"# {self.model}\n\n{notes}\n{markdown_table(head, rows)}\n"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"model": self.model, "notes": self.notes, "results": _plain(self.results)}

    def page(self) -> Page:
        """Return the report as a page."""
        header, *rows = self._rows()
        table = Table("Results", header, [Row(row) for row in rows], header[2:], code=())
        tasks = len(self.results)
        return Page(
            f"Quality of {self.model}",
            "MEASURED",
            "neutral",
            f"{tasks} task{'' if tasks == 1 else 's'}, {len(rows)} figures",
            [Section("Results", tables=[table], notes=self.notes)],
        )

    def write(self, path: Path) -> None:
        """Write Markdown, JSON or HTML, by the ending of `path`. The write is atomic.

        Raises:
            OSError: the file cannot be written.
        """
        match path.suffix:
            case ".md":
                text = self.markdown()
            case ".html":
                text = self.page().html()
            case _:
                text = json.dumps(self.to_dict(), indent=1) + "\n"
        write_whole(path, text)

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("task", "metric", "value", "standard error", "examples")]
        for each in self.figures:
            error = "" if each.standard_error is None else f"{each.standard_error:.4f}"
            count = "" if each.examples is None else str(each.examples)
            rows.append((each.task, each.metric, f"{each.value:.4f}", error, count))
        return rows


def _plain(value: Any) -> Any:
    """Return a value for JSON. Non-finite numbers and other types become strings."""
    match value:
        case dict():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return float(value)
    return str(value)

"""ModelComparison: quality of trained models on the same examples, relative to a baseline, and speed."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stackwise.benchmark.table import ComparisonTable
from stackwise.quality.paired import PairedDifference
from stackwise.quality.scoring import Scorer
from stackwise.quality.tasks import TaskResult, Tasks, cut_notes
from stackwise.report.page import Page, Row, Section, Table
from stackwise.report.plot import ACCENT, BAD, GOOD, INK, WARN, Plot, label_text, style_axes
from stackwise.support.arguments import check_choice, check_number, require
from stackwise.support.files import write_whole
from stackwise.support.markdown import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ModelComparison", "QualityRow", "compare_quality"]

_COLOURS = (INK, ACCENT, WARN, GOOD, BAD)


@dataclass(frozen=True)
class QualityRow:
    """Result of one model at one task.

    Attributes:
        architecture: name of the model.
        task: name of the task.
        metric: name of the value, such as "acc" or "bits_per_byte".
        less_is_better: True if the value is a cost.
        value: value of the model.
        standard_error: standard error of the value. None: unknown.
        examples: number of examples.
        difference: paired difference to the baseline on the same examples. None for the baseline.
    """

    architecture: str
    task: str
    metric: str
    less_is_better: bool
    value: float
    standard_error: float | None
    examples: int
    difference: PairedDifference | None = None

    @classmethod
    def of(cls, name: str, result: TaskResult, baseline: TaskResult | None, level: float) -> QualityRow:
        """Return the row of a model. baseline=None: the model is the baseline itself."""
        difference = None if baseline is None else result.difference(baseline, level=level)
        metric, less, value = result.metric, result.less_is_better, result.value
        error, count = result.standard_error, len(result.examples)
        return cls(name, result.task, metric, less, value, error, count, difference)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON and CSV."""
        found = {key: value for key, value in vars(self).items() if key != "difference"}
        parts = ("difference", "low", "high", "wins", "losses", "p_value")
        names = ("difference", "difference_low", "difference_high", "wins", "losses", "p_value")
        pairs = zip(names, parts, strict=True)
        return found | {name: self.difference and getattr(self.difference, part) for name, part in pairs}


@dataclass(frozen=True)
class ModelComparison:
    """Speed and quality of several models in one table.

    Attributes:
        quality: one row per task and model.
        baseline: name of the model with which the rest is compared.
        speed: table of `compare_architectures` for the same architectures. None: not measured.
        level: confidence level of the intervals of differences.
        notes: remarks on the evaluation of the models.
    """

    quality: tuple[QualityRow, ...]
    baseline: str
    speed: ComparisonTable | None = None
    level: float = 0.95
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.speed is not None:
            _check_speed(self.speed, self.baseline, self.architectures)

    @property
    def architectures(self) -> list[str]:
        """Names of the models, baseline first."""
        names = dict.fromkeys(row.architecture for row in self.quality)
        return sorted(names, key=lambda name: name != self.baseline)

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks in their order."""
        return list(dict.fromkeys(row.task for row in self.quality))

    def row(self, architecture: str, task: str) -> QualityRow:
        """Return the result of one model at one task.

        Raises:
            ValueError: the model or the task is unknown.
        """
        check_choice("architecture", architecture, self.architectures)
        check_choice("task", task, self.tasks)
        return next(row for row in self.quality if (row.architecture, row.task) == (architecture, task))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "baseline": self.baseline,
            "level": self.level,
            "notes": list(self.notes),
            "quality": [row.to_dict() for row in self.quality],
            "speed": self.speed and self.speed.to_dict(),
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the comparison as JSON, and write it to `path`, if any. Non-finite numbers are strings."""
        return _written(json.dumps(_finite(self.to_dict()), indent=1, allow_nan=False) + "\n", path)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return one line per model and workload or task.

        None is an empty field. Also write to `path`.
        """
        lines = [{"kind": "quality"} | row.to_dict() for row in self.quality]
        if self.speed is not None:
            lines += [{"kind": "speed"} | row for row in self.speed]
        columns = list(dict.fromkeys(key for line in lines for key in line))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return _written(text.getvalue(), path)

    def to_markdown(self) -> str:
        """Return a table with one row per model (speed, quality at each task, differences), and the notes."""
        header, rows = self._table()
        table = markdown_table(header, rows, right=header[1:])
        notes = "".join(f"- {_plain(note)}\n" for note in self.notes)
        return f"{table}\n\n{self._how()}\n" + (f"\n{notes}" if notes else "")

    def page(self) -> Page:
        """Return a page with plots, the table and the notes: `page().write("report.html")`."""
        header, rows = self._table()
        table = Table("Speed and quality", header, [Row(row) for row in rows], right=header[1:])
        title = f"Difference to {self.baseline}"
        plot = Plot(title, partial(self._draw, columns=1), 2.8 * len(self.tasks), "Lines are intervals.")
        counts = f"{len(self.architectures)} models, {len(self.tasks)} tasks, baseline {self.baseline}"
        section = Section("Speed and quality", plots=[plot], tables=[table], notes=[self._how(), *self.notes])
        environment = None if self.speed is None else self.speed.environment
        return Page(f"Comparison with {self.baseline}", "MEASURED", "neutral", counts, [section], environment)

    def _how(self) -> str:
        return f"Intervals cover {self.level:.0%}; differences are of the same examples, to {self.baseline}."

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and one row per model."""
        header, rows = ["architecture"], [[name] for name in self.architectures]
        if self.speed is not None:
            for work in dict.fromkeys(self.speed["workload"]):
                header += [f"{work}, tokens/s", "speed-up"]
                for line, name in zip(rows, self.architectures, strict=True):
                    [found] = self.speed.where(architecture=name, workload=work)
                    line += [_rate(found["tokens_per_second"]), self._speed_up(name, found)]
        for task in self.tasks:
            metric = self.row(self.baseline, task).metric
            header += [f"{task}, {metric}", "difference"]
            for line, name in zip(rows, self.architectures, strict=True):
                row = self.row(name, task)
                line += [_with_error(row), "baseline" if row.difference is None else str(row.difference)]
        return header, rows

    def plot(self, path: str | Path) -> Path:
        """Draw one panel per task: quality of each model against its speed, with both intervals.

        Without a speed table, the models are side by side.

        Args:
            path: path that ends with .svg or .png.

        Raises:
            ImportError: matplotlib is not installed: pip install 'stackwise[report]'.
            ValueError: the path has another suffix.
        """
        path = Path(path)
        require(path.suffix in (".svg", ".png"), "path", str(path), "a name ending in .svg or .png")
        try:
            drawing = import_module("matplotlib.figure")
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install 'stackwise[report]'") from error
        figure = drawing.Figure(figsize=(4.5 * len(self.tasks), 3.6), layout="constrained")
        self._draw(figure, columns=len(self.tasks))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        return path

    def _draw(self, figure: Figure, columns: int) -> None:
        """Draw a panel for each task, in one row or one column."""
        panels = figure.subplots(len(self.tasks) // columns, columns, squeeze=False).ravel()
        work = None if self.speed is None else self.speed["workload"][0]
        for panel, task in zip(panels, self.tasks, strict=True):
            for place, (name, colour) in enumerate(zip(self.architectures, cycle(_COLOURS), strict=False)):
                row = self.row(name, task)
                x, x_error = self._place(name, work, place)
                part = row.difference
                y = 0.0 if part is None else part.difference
                known = part is not None and math.isfinite(part.low) and math.isfinite(part.high)
                spread = [[y - part.low], [part.high - y]] if part is not None and known else None
                panel.errorbar(
                    [x],
                    [y],
                    yerr=spread,
                    xerr=x_error,
                    fmt="o",
                    capsize=3,
                    label=label_text(name),
                    color=colour,
                )
            panel.axhline(0.0, color=INK, linewidth=0.8)
            less = ", less is better" if self.row(self.baseline, task).less_is_better else ""
            title = f"{task} ({self.row(self.baseline, task).metric}{less})"
            panel.set_title(label_text(title), loc="left", fontsize="medium")
            panel.set_ylabel(f"difference to {label_text(self.baseline)}")
            if work is None:
                panel.set_xticks(range(len(self.architectures)), map(label_text, self.architectures))
            else:
                panel.set_xlabel(f"speed-up, {label_text(work)}")
        style_axes(figure)
        panels[0].legend(fontsize="small", frameon=False)

    def _place(self, name: str, work: str | None, place: int) -> tuple[float, list[list[float]] | None]:
        """Return the horizontal position of a model, and the length of its error bar in both directions."""
        if self.speed is None or work is None:
            return float(place), None
        [found] = self.speed.where(architecture=name, workload=work)
        ratio, low, high = (found[key] for key in ("speed_up", "speed_up_low", "speed_up_high"))
        if ratio is None:
            return math.nan, None
        if low is None or high is None:
            return ratio, None
        return ratio, [[max(0.0, ratio - low)], [max(0.0, high - ratio)]]

    def _speed_up(self, name: str, found: Mapping[str, Any]) -> str:
        if name == self.baseline:
            return "baseline"
        if found["speed_up"] is None:
            return "-"
        low, high = found["speed_up_low"], found["speed_up_high"]
        interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
        return f"{found['speed_up']:.3f}{interval}"


def compare_quality(
    models: Mapping[str, Any],
    tasks: Tasks,
    tokenizer: Any,
    *,
    baseline: str | None = None,
    speed: ComparisonTable | None = None,
    level: float = 0.95,
    **options: Any,
) -> ModelComparison:
    """Evaluate trained models on the same tasks, and compare each with a baseline.

    Args:
        models: trained models by name, each an argument of `Scorer`.
        tasks: tasks to evaluate.
        tokenizer: tokenizer of all models, or a mapping from names to tokenizers.
        baseline: name of the baseline. None: the first model.
        speed: result of `compare_architectures` for the same architectures, with the same baseline.
        level: confidence level of the intervals of differences.
        **options: options of `Scorer`, such as `batch_size`.

    Raises:
        ValueError: no models, an invalid level, an unknown baseline, a tokenizer without its model, or an
            error of `Scorer` or `Tasks.results`.
    """
    require(bool(models), "models", dict(models), "one or more, by name")
    check_number("level", level, "a number above 0 and below 1", lambda value: 0 < value < 1)
    baseline = next(iter(models)) if baseline is None else baseline
    check_choice("baseline", baseline, models)
    tokenizers = tokenizer if isinstance(tokenizer, Mapping) else dict.fromkeys(models, tokenizer)
    other = sorted(set(models) ^ set(tokenizers))
    require(not other, "tokenizer", other, "one for each model")
    if speed is not None:
        _check_speed(speed, baseline, models)
    results: dict[str, dict[str, TaskResult]] = {}
    notes = []
    for name, model in models.items():
        scorer = Scorer(model, tokenizers[name], **options)
        results[name] = tasks.results(scorer)
        notes += [
            f"{name}: prefixes: {scorer.model.reuse_note}",
            *(f"{name}: {each}" for each in cut_notes(scorer)),
        ]
    rows = [
        QualityRow.of(name, results[name][task], None if name == baseline else results[baseline][task], level)
        for task in tasks.each
        for name in models
    ]
    return ModelComparison(tuple(rows), baseline, speed, level, tuple(notes))


def _check_speed(speed: ComparisonTable, baseline: str, names: Iterable[str]) -> None:
    require(speed.baseline == baseline, "speed.baseline", speed.baseline, repr(baseline))
    other = sorted(set(speed["architecture"]) ^ set(names))
    require(not other, "architectures of the speed table", other, "those that are asked")


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {str(key): _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


def _with_error(row: QualityRow) -> str:
    return f"{row.value:.4f}" + ("" if row.standard_error is None else f" ± {row.standard_error:.4f}")


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        write_whole(Path(path), text)
    return text

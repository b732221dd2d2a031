"""ComparisonTable: measurements of architectures as rows, Markdown, CSV, JSON, HTML and a plot."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from stackwise.report.page import Page, Row, Section, Table
from stackwise.report.plot import ACCENT, INK, Plot, label_text, style_axes
from stackwise.support.arguments import check_choice, require
from stackwise.support.files import parse_json, write_whole
from stackwise.support.markdown import markdown_table
from stackwise.support.units import byte_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ComparisonTable"]

# Title and format of each column in Markdown.
_SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {
    "architecture": ("architecture", str),
    "workload": ("workload", str),
    "parameters": ("parameters", lambda n: f"{n:,}"),
    "tokens_per_second": ("tokens/s", lambda rate: f"{rate:,.0f}"),
    "speed_up": ("speed-up", lambda ratio: f"{ratio:.3f}"),
    "speed_up_interval": ("95 %", lambda interval: interval),
    "p50_seconds": ("p50 ms", lambda seconds: f"{seconds * 1e3:.3f}"),
    "p95_seconds": ("p95 ms", lambda seconds: f"{seconds * 1e3:.3f}"),
    "p99_seconds": ("p99 ms", lambda seconds: f"{seconds * 1e3:.3f}"),
    "ttft_seconds": ("TTFT ms", lambda seconds: f"{seconds * 1e3:.3f}"),
    "itl_p50_seconds": ("ITL p50 ms", lambda seconds: f"{seconds * 1e3:.3f}"),
    "itl_p95_seconds": ("ITL p95 ms", lambda seconds: f"{seconds * 1e3:.3f}"),
    "itl_p99_seconds": ("ITL p99 ms", lambda seconds: f"{seconds * 1e3:.3f}"),
    "tpot_seconds": ("TPOT ms", lambda seconds: f"{seconds * 1e3:.3f}"),
    "memory_bytes": ("memory", byte_text),
    "mfu": ("MFU", lambda part: f"{part:.1%}"),
    "hfu": ("HFU", lambda part: f"{part:.1%}"),
    "mbu": ("MBU", lambda part: f"{part:.1%}"),
    "floor_seconds": ("floor ms", lambda seconds: f"{seconds * 1e3:.3f}"),
    "bound": ("bound", str),
    "execution": ("execution", str),
    "note": ("note", str),
}
_LABELS = {"architecture", "workload", "mode", "bound", "execution", "note"}
_KEYS = ("architecture", "workload")


@dataclass(frozen=True, repr=False)
class ComparisonTable:
    """Table with one row for each architecture and workload. Unknown and unmeasured values are None, never 0.

    `str(table)` is its Markdown, which a notebook shows. `len(table)`, iteration over rows,
    `table["speed_up"]` (a column) and `table.where(architecture="llama")` work as with a data frame.
    `to_pandas` returns a DataFrame.

    Attributes:
        rows: mappings with the same keys in the same order.
        baseline: architecture that `speed_up` refers to.
        settings: settings of the comparison.
        environment: fingerprint of the machine.
        names: column names of a table without rows.
    """

    rows: tuple[dict[str, Any], ...]
    baseline: str
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            require(list(row) == self.columns, f"rows[{number}]", list(row), f"the columns {self.columns}")

    @property
    def columns(self) -> list[str]:
        """Names of the columns in order."""
        return list(self.rows[0] if self.rows else self.names)

    def __str__(self) -> str:
        return self.to_markdown()

    def __repr__(self) -> str:
        names = [", ".join(dict.fromkeys(map(str, self[key]))) for key in _KEYS if key in self.columns]
        what = ": " + " at ".join(names) if names else ""
        return f"ComparisonTable({len(self)} rows{what}; baseline {self.baseline!r})"

    def _repr_markdown_(self) -> str:
        return self.to_markdown()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, column: str) -> list[Any]:
        """Return the values of one column. Raise KeyError if the column does not exist."""
        if column not in self.columns:
            raise KeyError(f"{column!r}; columns: {', '.join(self.columns)}")
        return [row[column] for row in self.rows]

    def where(self, **values: Any) -> ComparisonTable:
        """Return a table of the rows with these values in these columns. It may have no rows.

        Raises:
            ValueError: unknown column.
        """
        for column in values:
            check_choice("column", column, self.columns)
        rows = tuple(row for row in self.rows if all(row[key] == value for key, value in values.items()))
        return ComparisonTable(rows, self.baseline, self.settings, self.environment, tuple(self.columns))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "baseline": self.baseline,
            "settings": self.settings,
            "environment": self.environment,
            "rows": [dict(row) for row in self.rows],
        }

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame([dict(row) for row in self.rows], columns=self.columns)

    def to_markdown(self, columns: Sequence[str] | None = None) -> str:
        """Return a Markdown table.

        Args:
            columns: names of the columns. None: all columns with a value, without `execution` if all rows of
                each workload have the same execution.

        Raises:
            ValueError: unknown column.
        """
        for column in columns or ():
            check_choice("column", column, [*self.columns, "speed_up_interval"])
        rows = [dict(row) | {"speed_up_interval": _interval(row)} for row in self.rows]
        hidden = set() if self._is_done_in_several_ways else {"execution"}
        telling = [n for n in _SHOWN if any(row.get(n) is not None for row in rows)] or self.columns
        names = list(columns or [name for name in telling if name not in hidden])
        header = [_SHOWN[name][0] if name in _SHOWN else name for name in names]
        cells = [[_cell(name, row[name]) for name in names] for row in rows]
        right = [title for title, name in zip(header, names, strict=True) if name not in _LABELS]
        return markdown_table(header, cells, right=right) + "\n"

    @property
    def _is_done_in_several_ways(self) -> bool:
        """True if the rows of some workload differ in their execution."""
        ways: dict[Any, Any] = {}
        return any(
            ways.setdefault(row.get("workload"), row.get("execution")) != row.get("execution")
            for row in self.rows
        )

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return all columns as CSV, with empty fields for None. If `path` is set, also write it there."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return _written(text.getvalue(), path)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return rows, baseline, settings and environment as JSON.

        If `path` is set, also write it to that file.
        """
        return _written(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n", path)

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Read a file of `to_json`."""
        stored = parse_json(Path(path).read_bytes())
        return cls(tuple(stored["rows"]), stored["baseline"], stored["settings"], stored["environment"])

    def plot(self, path: str | Path, column: str = "speed_up") -> Path:
        """Draw one column, with a panel for each workload and a bar for each architecture.

        Args:
            path: file name with the extension .svg or .png.
            column: column with numbers. "speed_up" is drawn with its intervals.

        Raises:
            ImportError: matplotlib is not installed: pip install 'stackwise[report]'.
            ValueError: another file extension, an unknown column, or a column without numbers.
        """
        path = Path(path)
        require(path.suffix in (".svg", ".png"), "path", str(path), "a name ending in .svg or .png")
        numeric = [name for name in self.columns if any(_is_number(row[name]) for row in self.rows)]
        check_choice("column", column, numeric)
        try:
            drawing = import_module("matplotlib.figure")
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install 'stackwise[report]'") from error
        # A figure of pyplot would stay in memory, and pyplot would look for a window.
        figure = drawing.Figure(figsize=(8, self._plot_height()), layout="constrained")
        self._draw(figure, column)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        return path

    def page(self) -> Page:
        """Return a page with plots, the table and the notes: `page().write("report.html")`."""
        shown = [name for name in _SHOWN if name not in _KEYS and self._is_known(name)]
        keys = [name for name in _KEYS if name in self.columns]
        rows = [dict(row) | {"speed_up_interval": _interval(row)} for row in self.rows]
        header = [_SHOWN[name][0] for name in (*keys, *shown)]
        table = Table(
            "Measurements",
            header,
            [Row([_cell(name, row[name]) for name in (*keys, *shown)]) for row in rows],
            right=[_SHOWN[name][0] for name in shown if name not in _LABELS],
            wide=("note", "execution"),
        )
        settings = [Row([key.replace("_", " "), _setting(value)]) for key, value in self.settings.items()]
        plots = []
        if self.rows and self._is_known("speed_up"):
            caption = "Lines are 95 % confidence intervals of the speed-up."
            title = f"Speed compared with {self.baseline}"
            plots.append(
                Plot(title, lambda figure: self._draw(figure, "speed_up"), self._plot_height(), caption)
            )
        sections = [Section("Speed-up and measurements", plots=plots, tables=[table])]
        if settings:
            tables = [Table("Settings", ["setting", "value"], settings, results=False)]
            sections.append(Section("Settings", tables=tables, folded=True))
        return Page(
            f"Comparison with {self.baseline}",
            "MEASURED",
            "neutral",
            self._summary(),
            sections,
            self.environment,
        )

    def _summary(self) -> str:
        """Return the number of architectures and, for each workload, the fastest one, in one line.

        A workload is undecided if the interval of its best speed-up contains 1.
        """
        parts = [f"{len(dict.fromkeys(self['architecture']))} architectures, baseline {self.baseline}"]
        for workload in dict.fromkeys(self["workload"]):
            rows = [row for row in self.where(workload=workload) if _is_number(row.get("speed_up"))]
            if rows:
                best = max(rows, key=lambda row: row["speed_up"])
                low, high = best.get("speed_up_low"), best.get("speed_up_high")
                is_decided = low is None or high is None or not low <= 1 <= high
                name = f"{best['architecture']} ({best['speed_up']:.3f} times)" if is_decided else "undecided"
                parts.append(f"fastest at {workload}: {name}")
        return "; ".join(parts)

    def _is_known(self, name: str) -> bool:
        if name == "speed_up_interval":
            return any(_interval(row) for row in self.rows)
        return any(row.get(name) is not None for row in self.rows)

    def _plot_height(self) -> float:
        """Return the height of a plot in inches."""
        workloads = list(dict.fromkeys(self["workload"]))
        return len(workloads) * (0.6 + 0.35 * max(len(self.where(workload=name)) for name in workloads))

    def _draw(self, figure: Figure, column: str) -> None:
        """Draw a panel for each workload and a bar for each architecture."""
        workloads = list(dict.fromkeys(self["workload"]))
        panels = figure.subplots(len(workloads), 1, squeeze=False)[:, 0]
        for panel, workload in zip(panels, workloads, strict=True):
            rows = [row for row in self.where(workload=workload) if _is_number(row[column])]
            values = [row[column] for row in rows]
            bars = None
            if column == "speed_up" and all(row["speed_up_low"] is not None for row in rows):
                bars = [
                    [max(0.0, row["speed_up"] - row["speed_up_low"]) for row in rows],
                    [max(0.0, row["speed_up_high"] - row["speed_up"]) for row in rows],
                ]
            panel.barh(range(len(rows)), values, xerr=bars, capsize=3, color=ACCENT, ecolor=INK)
            panel.set_yticks(range(len(rows)), [label_text(row["architecture"]) for row in rows])
            panel.invert_yaxis()
            panel.set_title(label_text(workload), loc="left", fontsize="medium")
            panel.set_xlim(left=0)
            if column == "speed_up":
                panel.axvline(1.0, color=INK, linewidth=0.8)
        label = f"times as fast as {label_text(self.baseline)}" if column == "speed_up" else column
        panels[-1].set_xlabel(label)
        style_axes(figure)


def _interval(row: dict[str, Any]) -> str | None:
    low, high = row.get("speed_up_low"), row.get("speed_up_high")
    return None if low is None or high is None else f"{low:.3f} to {high:.3f}"


def _cell(column: str, value: Any) -> str:
    """Return a value as text, in one line."""
    if value is None:
        return "-"
    write = _SHOWN[column][1] if column in _SHOWN else str
    return " ".join(str(write(value)).split())


def _setting(value: Any) -> str:
    """Return a setting as text, without the brackets of Python."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_setting(each)}" for key, each in value.items())
    return ", ".join(map(_setting, value)) if isinstance(value, list | tuple) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        write_whole(Path(path), text)
    return text

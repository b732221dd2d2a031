"""SearchResult: trials of a search, the best one, the Pareto front, and their files."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stackwise.config.yaml import dump_yaml
from stackwise.prototype.search.objective import OBJECTIVES, Objective
from stackwise.prototype.search.trial import SearchTrial
from stackwise.report.page import Page, Row, Section, Status, Table
from stackwise.report.plot import ACCENT, BAD, INK, MUTED, Plot, style_axes, svg_plot, write_svg
from stackwise.support.arguments import require
from stackwise.support.files import write_whole
from stackwise.support.markdown import markdown_table
from stackwise.support.units import byte_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table as RichTable

__all__ = ["SearchResult", "hypervolume"]

_MEASURED: dict[str, tuple[str, Callable[[Any], str]]] = {
    "loss": ("loss", lambda loss: f"{loss:.4f}"),
    "score": ("score", lambda score: f"{score:.3f}"),
    "tokens_per_second": ("tokens/s", lambda rate: f"{rate:,.0f}"),
    "peak_bytes": ("peak", byte_text),
    "parameters": ("parameters", lambda count: f"{count:,}"),
}
_NUMBERS = {"trial", *(name for name, _ in _MEASURED.values())}  # right-aligned columns


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        name: name of the study.
        storage: location of the study, without a password.
        objectives: minimized or maximized numbers.
        trials: all results by number, including failed and pruned ones.
        definition: settings that define a trial: such as space, steps and seeds.
        notes: notes for the reader.
    """

    name: str
    storage: str
    objectives: tuple[Objective, ...]
    trials: tuple[SearchTrial, ...]
    definition: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def succeeded(self) -> tuple[SearchTrial, ...]:
        """Successful trials."""
        return tuple(trial for trial in self.trials if trial.status == "success")

    @property
    def ranked(self) -> tuple[SearchTrial, ...]:
        """All trials: successes from best to worst by the first objective, then the rest by number."""
        first = self.objectives[0]
        failed = tuple(trial for trial in self.trials if trial.status != "success")
        return (*sorted(self.succeeded, key=lambda trial: (first.cost(trial), trial.number)), *failed)

    @property
    def best(self) -> SearchTrial | None:
        """Successful trial that is best by the first objective. None: no success."""
        return self.ranked[0] if self.succeeded else None

    @property
    def front_objectives(self) -> tuple[Objective, ...]:
        """Objectives of the front: the search's own if it has several, otherwise loss and tokens/s."""
        if len(self.objectives) > 1:
            return self.objectives
        return OBJECTIVES["loss"], OBJECTIVES["tokens_per_second"]

    @property
    def front(self) -> tuple[SearchTrial, ...]:
        """Successful trials that no other one dominates.

        A trial dominates another if it is at least as good in all objectives and better in one.
        """
        costs = self._costs()
        return tuple(
            trial
            for trial in self.succeeded
            if trial.number in costs
            and not any(_dominates(other, costs[trial.number]) for other in costs.values())
        )

    def hypervolume(self, reference: Sequence[float] | None = None) -> float:
        """Return the area that the front dominates, in units of the first objective times the second.

        To compare two results, use the same reference.

        Args:
            reference: one value for each of `front_objectives`, worse than all relevant values. None: the
                worst of each among the successes.

        Raises:
            ValueError: other than two objectives, or no success and no reference.
        """
        objectives = self.front_objectives
        names = [each.name for each in objectives]
        require(len(objectives) == 2, "objectives", names, "two of them: more have no exact area here")
        points = list(self._costs().values())
        if reference is None:
            require(len(points) > 0, "reference", None, "a value for each objective: nothing has succeeded")
            corner = [max(column) for column in zip(*points, strict=True)]
        else:
            require(len(reference) == 2, "reference", tuple(reference), "a value for each of 2 objectives")
            corner = [-v if o.maximize else float(v) for v, o in zip(reference, objectives, strict=True)]
        return hypervolume(points, corner)

    def to_markdown(self, *, last: int | None = None) -> str:
        """Return a table of all trials, best first. `*` marks the front, and unknown values are blank.

        Args:
            last: maximum number of rows. None: all.
        """
        head, rows = self._cells(last)
        return markdown_table(head, rows, right=_NUMBERS)

    def table(self, *, last: int | None = None) -> RichTable:
        """Return the same table for a terminal."""
        from rich.table import Table as RichTable
        from rich.text import Text

        head, rows = self._cells(last)
        table = RichTable()
        for name in head:
            table.add_column(name, justify="right" if name in _NUMBERS else "left")
        for row in rows:
            table.add_row(*map(Text, row))  # square brackets in a reason are not markup
        return table

    def to_csv(self) -> str:
        """Return one line per trial by number, with a column per key of the space, in full precision."""
        out = io.StringIO()
        keys = self._keys()
        measured = list(_MEASURED)
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["number", "status", "reason", *measured, "seconds", "front", *keys])
        front = {trial.number for trial in self.front}
        for trial in self.trials:
            plain = trial.to_dict()
            row = [trial.number, trial.status, trial.reason, *(plain[key] for key in measured), trial.seconds]
            row += [int(trial.number in front), *(_exact(trial, key) for key in keys)]
            writer.writerow(row)
        return out.getvalue()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        best = self.best
        return {
            "name": self.name,
            "storage": self.storage,
            "objectives": [each.name for each in self.objectives],
            "definition": self.definition,
            "best": None if best is None else best.number,
            "front": [trial.number for trial in self.front],
            "front_objectives": [each.name for each in self.front_objectives],
            "notes": list(self.notes),
            "trials": [trial.to_dict() for trial in self.trials],
        }

    def plot(self, path: str | Path) -> Path:
        """Draw all trials by loss and tokens/s, or by the first two objectives, to a new SVG.

        Raises:
            ValueError: another file extension than .svg, or no trial has both values.
            ImportError: matplotlib is not installed.
        """
        return write_svg(path, svg_plot((7, 4.5), self._draw))

    def save(self, folder: str | Path) -> list[Path]:
        """Write the trials as files, and if one succeeded the best configuration and the Pareto front.

        The files are `report.html`, `trials.md`, `trials.csv`, `search.json`, `best.yaml` and `front.svg`.

        Returns:
            Paths of the written files. Without matplotlib, `front.svg` is not among them.
        """
        folder = Path(folder)
        texts = {
            "trials.md": self.to_markdown() + "\n",
            "trials.csv": self.to_csv(),
            "search.json": json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n",
            "report.html": self.page().html(),
        }
        if self.best is not None:
            texts["best.yaml"] = dump_yaml(self.best.config.to_dict())
        written = [folder / name for name in texts]
        for path, text in zip(written, texts.values(), strict=True):
            write_whole(path, text)
        if self.front:
            with suppress(ImportError):  # the other files of a long search are complete without it
                written.append(self.plot(folder / "front.svg"))
        return written

    def page(self) -> Page:
        """Return the search as a page: the Pareto front and all trials, the best first."""
        head, rows = self._cells(None)
        place = head.index("status")
        columns = [*head[:place], "reason", *head[place + 1 :]]
        statuses: dict[str, Status] = {"success": "passed", "pruned": "neutral"}
        lines = [
            Row(
                [*row[:place], trial.reason, *row[place + 1 :]],
                statuses.get(trial.status, "warning"),
                trial.status,
            )
            for trial, row in zip(self.ranked, rows, strict=True)
        ]
        plots = [Plot("Trials and Pareto front", self._draw, 4.0)] if self.front else []
        best = self.best
        found = "" if best is None else f"; best in trial {best.number}: {_values(best)}"
        return Page(
            f"Search {self.name}",
            "NONE SUCCEEDED"
            if best is None
            else f"{self.objectives[0].name} {self.objectives[0].of(best):.4g}",
            "failed" if best is None else "passed",
            self._counts() + found,
            [
                Section(
                    "Trials",
                    plots=plots,
                    tables=[Table("Trials", columns, lines, right=_NUMBERS)],
                    notes=self.notes,
                )
            ],
        )

    def __str__(self) -> str:
        best, first = self.best, self.objectives[0]
        lines = [f"{self.name}: {self._counts()}"]
        if best is not None:
            lines.append(f"  best {first.name} {first.of(best):.6g} in trial {best.number}: {_values(best)}")
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)

    def _draw(self, figure: Figure) -> None:
        """Draw the trials in the plane of two objectives.

        Each success is a dot. Dots on the Pareto front are larger, have the trial's number and are joined by
        steps. A trial that failed with both objectives known is a cross.
        """
        up, across = self.front_objectives[:2]
        known = [t for t in self.trials if across.of(t) is not None and up.of(t) is not None]
        require(len(known) > 0, "trials", len(known), f"one or more with {up.name} and {across.name}")
        points = {t.number: (across.of(t), up.of(t)) for t in known}
        axes = figure.subplots()
        for status, colour, marker in (("success", MUTED, "o"), ("failed", BAD, "x")):
            chosen = [points[t.number] for t in known if (t.status == "success") == (status == "success")]
            if chosen:
                xs, ys = zip(*chosen, strict=True)
                axes.scatter(xs, ys, c=colour, marker=marker, s=24, label=status)
        front = sorted((points[t.number], str(t.number)) for t in self.front)
        if front:
            xs, ys = zip(*(point for point, _ in front), strict=True)
            # Between two points, the front stays at the value that it has already reached.
            axes.step(xs, ys, where="pre" if across.maximize else "post", color=ACCENT, linewidth=1)
            axes.scatter(xs, ys, c=ACCENT, s=40, label="Pareto front", zorder=3)
            for point, number in front:
                axes.annotate(number, point, textcoords="offset points", xytext=(5, 5), color=INK)
        if all(x is not None and x > 0 for x, _ in points.values()):
            axes.set_xscale("log")
        axes.set_xlabel(f"{across.name} [{across.unit}]")
        axes.set_ylabel(f"{up.name} [{up.unit}]")
        axes.set_title(self.name, loc="left", color=INK, parse_math=False)
        axes.legend(frameon=False)
        style_axes(figure)

    def _costs(self) -> dict[int, tuple[float, ...]]:
        """Return the objectives of the front by number of a success that has all of them. Lower is better."""
        objectives = self.front_objectives
        return {
            trial.number: tuple(each.cost(trial) for each in objectives)
            for trial in self.succeeded
            if all(each.of(trial) is not None for each in objectives)
        }

    def _counts(self) -> str:
        return f"{len(self.trials)} trials, {len(self.succeeded)} succeeded"

    def _cells(self, last: int | None) -> tuple[list[str], list[list[str]]]:
        """Return the head and the rows of a table."""
        keys = self._keys()
        shown = [key for key in _MEASURED if any(getattr(trial, key) is not None for trial in self.trials)]
        head = ["trial", "front", *(_MEASURED[key][0] for key in shown), "status", *keys]
        rows = []
        front = {trial.number for trial in self.front}
        for trial in self.ranked[:last]:
            measured = [_shown(_MEASURED[key][1], getattr(trial, key)) for key in shown]
            mark = "*" if trial.number in front else ""
            status = trial.status if not trial.reason else f"{trial.status}: {trial.reason}"
            values = [_value(trial, key) for key in keys]
            rows.append([str(trial.number), mark, *measured, status, *values])
        return head, rows

    def _keys(self) -> list[str]:
        """Return the keys with values in any trial. Not all trials have the solved keys."""
        return list(dict.fromkeys(key for trial in self.trials for key in trial.values))


def hypervolume(points: Iterable[Sequence[float]], reference: Sequence[float]) -> float:
    """Return the area between points and a reference point in two dimensions. It is exact.

    Args:
        points: pairs of numbers. Lower is better. Points beyond the reference are ignored.
        reference: pair of numbers that is worse than all relevant points.
    """
    area, height = 0.0, reference[1]
    for x, y in sorted(map(tuple, points)):
        if x < reference[0] and y < height:
            area += (reference[0] - x) * (height - y)
            height = y
    return area


def _dominates(point: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Return True if `point` is at least as good in all coordinates and better in one. Lower is better."""
    return point != other and all(a <= b for a, b in zip(point, other, strict=True))


def _shown(form: Callable[[Any], str], value: Any) -> str:
    return "" if value is None or not math.isfinite(value) else form(value)


def _values(trial: SearchTrial) -> str:
    return ", ".join(f"{key}={_plain(value)}" for key, value in trial.values.items())


def _value(trial: SearchTrial, key: str) -> str:
    return _plain(trial.values[key]) if key in trial.values else ""


def _exact(trial: SearchTrial, key: str) -> str:
    value = trial.values.get(key)
    return repr(value) if isinstance(value, float) else _value(trial, key)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "null" if value is None else str(value)

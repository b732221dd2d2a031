"""Figures: plots of training runs and latencies, from their records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, TypeVar

from stackwise.report.plot import ACCENT, BAD, GOOD, INK, MUTED, WARN, Plot, draw_legend, style_axes
from stackwise.support.units import time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["latency_plot", "training_plot"]

Item = TypeVar("Item")

# Maximum points per line and markers per kind. More only enlarge the file.
_MOST_STEPS, _MOST_MARKS = 1000, 200


def training_plot(
    title: str, run: dict[str, Any], *, status: str = "neutral", caption: str = ""
) -> Plot | None:
    """Return a plot of loss and gradient norm over the steps, or None for fewer than two losses.

    Steps at which a fault acted, alarms, skipped updates and replays are marked.

    Args:
        title: heading of the plot.
        run: a StabilityRun or a training run as a dict: "records", "alarms" and "fired".
        status: status for the filter of the page.
        caption: sentence below the heading.
    """
    records = run["records"]
    if len({record["step"] for record in records}) < 2 or "loss" not in records[0]:
        return None
    marked = _alarm_steps(run) | set(run.get("fired", ()))
    drawn = _thinned(records, marked)
    if len(drawn) < len(records):
        caption = f"{caption} {len(drawn):,} of {len(records):,} steps are drawn.".strip()
    twin = (run.get("recovery") or {}).get("twin", ())

    def draw(figure: Figure) -> None:
        for axes, key, label in zip(
            figure.subplots(2, 1, sharex=True), ("loss", "grad_norm"), ("loss", "gradient norm"), strict=True
        ):
            _draw_steps(axes, drawn, key, run)
            if key == "loss" and twin:
                steps = range(len(twin))
                axes.plot(
                    steps,
                    [float(loss) for loss in twin],
                    color=MUTED,
                    linestyle="--",
                    label="without fault",
                )
            axes.set_ylabel(label)
        axes.set_xlabel("step")
        style_axes(figure)
        named = {
            text: line
            for axes in figure.axes
            for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if len(named) > 1:
            draw_legend(figure, list(named.values()), list(named))

    return Plot(title, draw, 3.6, caption, status)


def latency_plot(
    title: str, histogram: dict[str, Any], percentiles: dict[str, Any] | None, *, caption: str = ""
) -> Plot:
    """Return a histogram of latencies with its percentiles.

    Args:
        title: heading of the plot.
        histogram: as `stackwise.benchmark.timing.histogram` returns it, in seconds.
        percentiles: by name ("p50"), with "value" in seconds, or None if it is withheld.
        caption: sentence below the heading.
    """
    edges, counts = histogram["edges"], histogram["counts"]
    scale, unit = _unit(edges[-1])
    known = {
        name: each["value"] for name, each in (percentiles or {}).items() if each.get("value") is not None
    }
    if histogram["above"]:
        slower = (
            "1 slower sample is" if histogram["above"] == 1 else f"{histogram['above']} slower samples are"
        )
        caption = f"{caption} {slower} not drawn.".strip()

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.stairs(counts, [edge * scale for edge in edges], fill=True, color=ACCENT)
        styles = (("-", INK), ("--", WARN), (":", BAD))
        for (name, value), (line, colour) in zip(known.items(), styles, strict=False):
            text = f"{name} {time_text(value, 3)}"
            axes.axvline(value * scale, color=colour, linestyle=line, linewidth=1.4, label=text)
        axes.set_xlabel(f"latency [{unit}]")
        axes.set_ylabel("samples")
        axes.locator_params(axis="y", integer=True)
        style_axes(figure)
        if known:
            draw_legend(figure, *axes.get_legend_handles_labels())

    return Plot(title, draw, 2.6, caption)


def _draw_steps(axes: Axes, records: Sequence[dict[str, Any]], key: str, run: dict[str, Any]) -> None:
    """Draw a value per step (of its last attempt), with markers for faults, alarms, skips and replays."""
    points = [(record["step"], float(record[key])) for record in records]
    attempts = _attempts(records)
    if fired := _some(run.get("fired", ()), _MOST_MARKS):
        # A file with one line with gaps is smaller than a file with many lines.
        xs = [x for step in fired for x in (step, step, math.nan)]
        ys = [0.0, 1.0, math.nan] * len(fired)
        upright = axes.get_xaxis_transform()
        axes.plot(xs, ys, transform=upright, color=BAD, linestyle=":", linewidth=1.2, label="fault")
    axes.plot(*zip(*sorted(dict(points).items()), strict=True), color=ACCENT, linewidth=1.4, label="run")
    finite = [math.isfinite(value) for _, value in points]
    for kind, marker, colour in (("skipped", "o", WARN), ("replayed", "D", GOOD)):
        wanted = [drawable and attempt == kind for drawable, attempt in zip(finite, attempts, strict=True)]
        if marked := _some(list(compress(points, wanted)), _MOST_MARKS):
            style: dict[str, Any] = {
                "color": colour,
                "markersize": 5,
                "markerfacecolor": "none",
                "label": kind,
            }
            axes.plot(*zip(*marked, strict=True), marker, **style)
    values = [value for _, value in compress(points, finite)]
    if values and 0 < 30 * min(values) < max(values):
        axes.set_yscale("log")
    if alarms := _some(sorted(_alarm_steps(run)), _MOST_MARKS):
        # At the upper edge: the value of an alarm may not be finite.
        axes.plot(
            alarms,
            [1.0] * len(alarms),
            "v",
            color=BAD,
            markersize=7,
            clip_on=False,
            transform=axes.get_xaxis_transform(),
            label="alarm",
        )


def _attempts(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return "skipped", "replayed" or "first" for each record."""
    seen: set[int] = set()
    kinds = []
    for record in records:
        kinds.append(
            "skipped" if record.get("skipped") else "replayed" if record["step"] in seen else "first"
        )
        seen.add(record["step"])
    return kinds


def _alarm_steps(run: dict[str, Any]) -> set[int]:
    return {alarm["step"] for alarm in run["alarms"] if "step" in alarm}


def _thinned(records: Sequence[dict[str, Any]], marked: set[int]) -> Sequence[dict[str, Any]]:
    """Return a sample of the records that includes marked and skipped ones, in order."""
    places = range(len(records))
    special = [place for place in places if records[place]["step"] in marked or records[place].get("skipped")]
    return [records[place] for place in sorted({*_some(places, _MOST_STEPS), *_some(special, _MOST_STEPS)})]


def _some(items: Sequence[Item], most: int) -> Sequence[Item]:
    """Return every nth item, at most `most` items."""
    return items[:: max(1, math.ceil(len(items) / most))]


def _unit(seconds: float) -> tuple[float, str]:
    """Return the factor and the name of the largest unit of which `seconds` is at least one."""
    return (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
